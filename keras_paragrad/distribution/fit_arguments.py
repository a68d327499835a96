"""Validation of the arguments of `DistributedFit.fit` other than data, before any worker waits for another."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.arguments import check_each, check_flag, check_instance, check_integer, check_number
from keras_paragrad.distribution.data import DistributedData
from keras_paragrad.distribution.plan import Plan


def check_fit(
    model: Any,
    callbacks: Any,
    *,
    epochs: Any,
    initial_epoch: Any,
    validation_split: Any,
    validation_steps: Any,
    validation_batch_size: Any,
    validation_freq: Any,
    normalize: Any,
) -> Sequence[keras.callbacks.Callback]:
    """The callbacks as a sequence; a single one is accepted, as in Keras."""
    check_instance("model", model, keras.Model, "a Keras model")
    check_integer("epochs", epochs, least=0, example=10)
    check_integer("initial_epoch", initial_epoch, least=0, example=0)
    check_number("validation_split", validation_split, least=0, below=1, example=0.2)
    check_integer("validation_steps", validation_steps, optional=True)
    check_integer("validation_batch_size", validation_batch_size, optional=True)
    if isinstance(validation_freq, (list, tuple, set)):
        check_each("validation_freq", validation_freq, check_integer, "epochs")
    else:
        check_integer("validation_freq", validation_freq, example=1)
    check_flag("normalize", normalize)
    if callbacks is None or isinstance(callbacks, keras.callbacks.Callback):
        return [] if callbacks is None else [callbacks]
    return check_each("callbacks", callbacks, checked_callback, "Keras callbacks")


def checked_callback(name: str, value: Any) -> keras.callbacks.Callback:
    """Checks that a value is a callback; see `keras_paragrad.arguments.check_instance`."""
    return check_instance(name, value, keras.callbacks.Callback, "a Keras callback")


def check_own_fit(model: keras.Model, x: Any, data_options: dict[str, Any], plan: Plan) -> None:
    """Refuses what can't be done for a model whose class overrides `fit`, and so reads its data itself."""
    prepared = f"{type(model).__name__} overrides `fit`. Write dist.prepare(model) and then"
    if isinstance(x, DistributedData):
        raise ValueError(
            f"{prepared} keras.Model.fit(model, data), which takes data that is already sharded; or pass the original "
            "data to dist.fit."
        )
    if plan.batch.value == "per_replica":
        raise ValueError(
            f'{prepared} model.fit(...) with the batch of all replicas: batch="per_replica" has no effect on data that '
            "the model reads itself. Leave it out."
        )
    if data_options:
        listed = ", ".join(f"{option}=" for option in data_options)
        raise ValueError(
            f"{prepared} model.fit(...) without {listed}, which has no effect on data that the model reads itself. "
            "Configure that in a tf.data.Dataset; or preprocess the data, and write "
            "keras.Model.fit(model, dist.dataset(x, y))."
        )
