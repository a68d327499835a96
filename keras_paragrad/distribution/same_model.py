"""Whether all workers are about to train the same model in the same way."""

import json
import zlib
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.distribution.workers import agree, place_of

SAME_CODE = (
    " Start the same script with the same arguments and the same versions of Python's packages everywhere; a model or "
    "an optimizer that depends on the worker can't be trained by several."
)


def check_same_model(strategy: tf.distribute.Strategy, model: Any) -> None:
    """Raises on every worker if their models differ, before they wait for each other's gradients in vain.

    Args:
        strategy: The strategy whose workers all call this; nothing is compared if there is one.
        model: This worker's, compiled.

    Raises:
        ValueError: The models have other weights, or are trained otherwise. The message gives every worker's numbers.
    """
    if place_of(strategy).workers == 1:
        return
    weights = model.trainable_variables
    numbers = {
        "trainable weights": len(weights),
        "values in them": sum(weight.shape.num_elements() or 0 for weight in weights),
        "batches in an execution": model.steps_per_execution,
    }
    agree(strategy, numbers, "model", SAME_CODE)
    agree(
        strategy, {"as the checksum of its own": _checksum(model)}, "weights' shapes, optimizer or versions", SAME_CODE
    )


def _checksum(model: Any) -> int:
    shapes = [(tuple(weight.shape), weight.dtype, weight.trainable) for weight in model.variables]
    jit = bool(model.jit_compile)
    described = repr((shapes, _optimizer(model.optimizer), jit, keras.__version__, tf.__version__))
    return zlib.crc32(described.encode())


def _optimizer(optimizer: Any) -> str:
    try:
        return json.dumps(keras.saving.serialize_keras_object(optimizer), sort_keys=True, default=lambda other: "")
    except (TypeError, ValueError):
        # Something in it, such as a function of the user's own, has no description.
        return type(optimizer).__name__
