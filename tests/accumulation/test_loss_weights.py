"""Variables in `loss_weights` count with the value that they have at each step, in evaluation and privately too.

The cases of `fuzz/cases.py` anneal them in each way to train.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit, make_private

ROWS = 12
X = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype("float32")
Y = {"a": X.sum(1, keepdims=True), "b": X[:, :1] ** 2}


def model_of(**compiled):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    model = keras.Model(x, {"a": layers.Dense(1, name="a")(y), "b": layers.Dense(1, name="b")(y)})
    model.compile("sgd", {"a": "mse", "b": "mse"}, **compiled)
    return model


def test_evaluation_on_replicas_takes_them_too():
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        weights = {name: tf.Variable(1.0, trainable=False) for name in Y}
        model = model_of(loss_weights=weights)
    dist.prepare(model)
    found = {}
    for value in (0.0, 2.0):
        weights["b"].assign(value)
        found[value] = model.evaluate(X, Y, batch_size=ROWS, verbose=0, return_dict=True)
    for value, results in found.items():
        np.testing.assert_allclose(results["loss"], results["a_loss"] + value * results["b_loss"], rtol=1e-5)


@pytest.mark.long
def test_under_privacy():
    def private(weights):
        private = make_private(
            model_of(), clip_norm=1.0, expected_batch_size=8, noise_multiplier=1.0, delta=1e-3, seed=1
        )
        private.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": "mse"}, loss_weights=weights)
        private.fit(X, Y, epochs=1, verbose=0)
        return private

    numbers = {"a": 0.3, "b": 2.0}
    variables = {name: keras.Variable(value, trainable=False) for name, value in numbers.items()}
    assert largest_difference(private(variables), private(numbers)) < 1e-6
