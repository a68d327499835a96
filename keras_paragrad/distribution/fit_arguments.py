"""Validation of the arguments of `DistributedFit.fit` other than data, before any worker waits for another."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.arguments import check_each, check_flag, check_instance, check_integer, check_number


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
    """The callbacks as a sequence; a single one is accepted, as in Keras.

    Raises:
        ValueError: `keras.Model.fit` does not accept an argument. The message names it.
    """
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
