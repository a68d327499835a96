"""A loss that only the rows of one worker show to divide by a count of labels, in processes of their own."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_paragrad import DistributedFit

ROWS, MARKER = 16, -999.0
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
# The first worker has none of the missing labels.
MISSING = (np.arange(ROWS) >= ROWS // 2) & (np.arange(ROWS) % 3 > 0)
Y = np.where(MISSING, MARKER, X.sum(1))[:, None].astype("float32")


def of_labels(y: Any, p: Any) -> Any:
    present = ops.cast(ops.not_equal(y, MARKER), "float32")
    return ops.sum(present * ops.square(y - p)) / ops.maximum(ops.sum(present), 1.0)


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = of_labels(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def model_of_one_layer(kind: Any = keras.Sequential) -> keras.Model:
    model = kind([keras.Input((6,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05), of_labels)
    return model


def trained_and_evaluated(_: Any) -> tuple[list[float], list[float], str]:
    """On one of several workers, what evaluating and training show, what one device shows, and a refusal."""
    options = {"batch_size": ROWS, "verbose": 0}

    def losses(evaluated: keras.Model, trained: keras.Model, fit: Any) -> list[float]:
        history = fit(X, Y, epochs=2, shuffle=False, **options).history
        return [evaluated.evaluate(X, Y, **options), *history["loss"], *map(float, trained.get_weights()[0][:, 0])]

    dist = DistributedFit("multi_worker", jit=False)
    with dist.scope():
        evaluated, trained, refused = model_of_one_layer(), model_of_one_layer(), model_of_one_layer(OwnStep)
    dist.prepare(evaluated)
    shown = losses(evaluated, trained, lambda *data, **how: dist.fit(trained, *data, **how))
    try:
        dist.fit(refused, X, Y, shuffle=False, **options)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    one = model_of_one_layer()
    return shown, losses(model_of_one_layer(), one, one.fit), refusal
