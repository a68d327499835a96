"""Finding the `PerExampleGradients` layer of a model."""

from typing import Any

import keras

from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad.per_example.wrapper import PerExampleGradients


def find_layer(model: keras.Model) -> Any:
    """The model's first `PerExampleGradients` layer, or `None`."""
    return next((layer for layer in all_layers(model) if isinstance(layer, PerExampleGradients)), None)
