"""Models to plan the memory of, and trials that take what was estimated."""

import keras
import numpy as np

from keras_paragrad.memory.cost import Speed
from keras_paragrad.memory.plan import Choice

ROWS, WIDE = 512, 64
SPEED = Speed(1e11, 1e10, 1e-6)
X = np.random.default_rng(0).normal(size=(ROWS, WIDE)).astype("float32")
Y = X[:, :1]


def deep(**options):
    """A model whose activations take the most memory, and free some when they are recomputed."""
    keras.utils.set_random_seed(0)
    hidden = inputs = keras.Input((WIDE,))
    for index in range(2):
        layers = [keras.layers.Dense(512, "gelu"), keras.layers.Dense(WIDE)]
        hidden = keras.layers.Add()([hidden, keras.Sequential(layers, name=f"block_{index}")(hidden)])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden), name="deep")
    model.compile("adam", "mse", **options)
    return model


def recurrent():
    model = keras.Sequential([keras.Input((20, 8)), keras.layers.LSTM(16), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def convolutional():
    layers = [keras.layers.Conv2D(8, 3, strides=2), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def contrastive():
    """Its loss compares all rows with each other."""

    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)) ** 2)

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", loss)
    return model


def exactly(candidate):
    """A trial that takes what was estimated."""
    return candidate.estimated


def whole(ways):
    """The bytes of a step as it is."""
    return next(each.estimated.bytes for each in ways.candidates if each.choice == Choice())
