"""Refuses layers that mix examples: per-example gradients need outputs that don't depend on other examples."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.engine.probes.row_independence import find_mixing_layer

_FOUND: "weakref.WeakKeyDictionary[keras.layers.Layer, dict]" = weakref.WeakKeyDictionary()


def check_layer(layer: keras.layers.Layer, *arguments: Any, training: bool = True) -> None:
    """Refuses a layer that mixes examples; the probe runs once for arguments of the same shapes and dtypes.

    Args:
        layer: A built layer or model.
        *arguments: The arguments of its call; only their shapes and dtypes matter.
        training: Whether it is called in training mode.

    Raises:
        ValueError: The layer, or one inside it, mixes examples.
    """
    known = _FOUND.setdefault(layer, {})
    key = (training, *map(_kind, keras.tree.flatten(arguments)))
    if key not in known:
        known[key] = find_mixing_layer(layer, *arguments, training=training)
    if known[key]:
        raise ValueError(
            f"The output of {known[key]!r} for one example depends on the others in the batch, so an example has no "
            "gradient of its own. Don't reduce over the batch axis 0."
        )


def check_model(model: Any) -> None:
    """Refuses a model that mixes examples, if its input shapes are known.

    Raises:
        ValueError: A layer mixes examples.
    """
    if getattr(model, "inputs", None):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        check_layer(model, keras.tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), inputs))


def _kind(value: Any) -> Any:
    return (value.dtype, *value.shape[1:]) if isinstance(value, (tf.Tensor, tf.TensorSpec)) else repr(value)
