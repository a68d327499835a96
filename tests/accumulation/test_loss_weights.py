"""Variables in `loss_weights`, which a callback changes, count with the value that they have at each step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, make_private, microbatch

ROWS, SIZE = 12, 4
TOLERANCE = 1e-6
X = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype("float32")
Y = {"a": X.sum(1, keepdims=True), "b": X[:, :1] ** 2}


def of_keras(value):
    return keras.Variable(value, trainable=False)


def of_tensorflow(value):
    return tf.Variable(value, trainable=False)


def by_row(y, p):
    return ops.mean(ops.square(y - p), -1)


class Annealing(keras.callbacks.Callback):
    """From an epoch to the next, the first loss counts less and the second, which is 0 at first, more."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def on_epoch_begin(self, epoch, logs=None):
        self.weights["a"].assign(1.0 / (1 + epoch))
        self.weights["b"].assign(float(epoch))


def model_of(variable, loss="mse", optimizer=None, **arguments):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,))
    y = layers.Dense(8, activation="tanh")(x)
    model = keras.Model(x, {"a": layers.Dense(1, name="a")(y), "b": layers.Dense(1, name="b")(y)})
    weights = {"a": variable(1.0), "b": variable(0.0)}
    sgd = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(sgd, {"a": loss, "b": loss}, loss_weights=weights, **arguments)
    return model, weights


def trained(model, weights, size=ROWS, callbacks=(), fit=None):
    callbacks = [*callbacks, Annealing(weights)]
    history = (fit or model.fit)(X, Y, batch_size=size, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return model, history.history


def in_windows(variable, loss):
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), ROWS // SIZE)
    return trained(*model_of(variable, loss, optimizer), SIZE, [ExactAccumulation()])


def in_slices(variable, loss):
    model, weights = model_of(variable, loss)
    with microbatch(model, SIZE):
        return trained(model, weights)


def on_replicas(variable, loss, **options):
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"], **options)
    with dist.scope():
        model, weights = model_of(variable, loss)
    return trained(model, weights, fit=lambda *data, **how: dist.fit(model, *data, **how))


def in_shards(variable, loss):
    return on_replicas(variable, loss, shard="parameters", min_shard_bytes=1)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("way", "loss", "variable"),
    [
        (in_windows, "mse", of_tensorflow),
        (in_windows, by_row, of_keras),
        (in_slices, "mse", of_keras),
        (in_slices, by_row, of_tensorflow),
        (on_replicas, "mse", of_tensorflow),
        (on_replicas, by_row, of_keras),
        (in_shards, "mse", of_keras),
    ],
)
def test_they_count_with_their_value_at_each_step(way, loss, variable):
    model, shown = way(variable, loss)
    alone, expected = trained(*model_of(variable, loss))
    assert largest_difference(model, alone) < TOLERANCE
    for name, values in expected.items():
        np.testing.assert_allclose(shown[name], values, rtol=1e-5, err_msg=name)


def test_evaluation_on_replicas_takes_them_too():
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        model, weights = model_of(of_tensorflow)
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
        model, _ = model_of(float)
        private = make_private(model, clip_norm=1.0, expected_batch_size=8, noise_multiplier=1.0, delta=1e-3, seed=1)
        private.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": "mse"}, loss_weights=weights)
        private.fit(X, Y, epochs=1, verbose=0)
        return private

    variables = {"a": of_keras(0.3), "b": of_keras(2.0)}
    assert largest_difference(private(variables), private({"a": 0.3, "b": 2.0})) < TOLERANCE
