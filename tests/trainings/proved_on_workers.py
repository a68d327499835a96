"""A loss that only the rows of one worker show to divide by a count of labels, in processes of their own."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_paragrad import DistributedFit

ROWS, MARKER = 16, -999.0
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
# The first worker has none of the missing labels.
MISSING = (np.arange(ROWS) >= ROWS // 2) & (np.arange(ROWS) % 3 > 0)
Y = np.where(MISSING, MARKER, X.sum(1))[:, None].astype("float32")


def of_labels(y: Any, p: Any) -> Any:
    """A value per example, which the number of labels that aren't missing divides."""
    present = ops.cast(ops.not_equal(y, MARKER), "float32")
    return ops.mean(present * ops.square(y - p), -1) / ops.maximum(ops.mean(present), 0.01)


def model_of_one_layer() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), of_labels)
    return model


def trained_and_evaluated(_: Any) -> tuple[list[float], list[float]]:
    """On one of several workers, what evaluating and training show, and what one device shows."""
    options = {"batch_size": ROWS, "verbose": 0}

    def losses(evaluated: keras.Model, trained: keras.Model, fit: Any) -> list[float]:
        history = fit(X, Y, epochs=2, shuffle=False, **options).history
        return [evaluated.evaluate(X, Y, **options), *history["loss"], *map(float, trained.get_weights()[0][:, 0])]

    dist = DistributedFit("multi_worker", jit=False)
    with dist.scope():
        evaluated, trained = model_of_one_layer(), model_of_one_layer()
    dist.prepare(evaluated)
    shown = losses(evaluated, trained, lambda *data, **how: dist.fit(trained, *data, **how))
    one = model_of_one_layer()
    return shown, losses(model_of_one_layer(), one, one.fit)
