"""The one check of saving that every component's test calls."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

FORMATS = ("keras", "weights.h5", "checkpoint")


def saved_and_loaded(model: keras.Model, rebuild: Callable[[], keras.Model], form: str, folder: Path) -> keras.Model:
    """Saves a model in one of the `FORMATS` and gives back another that was loaded from it.

    Args:
        model: What to save.
        rebuild: Makes a fresh model of the same kind, compiled; not used for `"keras"`, which brings its own.
        form: The format.
        folder: An empty folder.

    Returns:
        The loaded model, with every weight of the saved one.
    """
    path = folder / f"saved.{form}"
    if form == "keras":
        model.save(path)
        loaded = keras.models.load_model(path)
    else:
        loaded = rebuild()
        loaded.optimizer.build(loaded.trainable_variables)
        if form == "weights.h5":
            model.save_weights(path)
            loaded.load_weights(path)
        else:
            saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(path))
            tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).read(saved).assert_consumed()
    for before, after in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    return loaded


def check_config(component) -> None:
    """A component and what its config makes have the same config."""
    config = component.get_config()
    again = type(component).from_config(config)
    assert again.get_config() == config
    whole = keras.saving.serialize_keras_object(component)
    assert keras.saving.deserialize_keras_object(whole).get_config() == config
