"""A warning is said once for a model, not for each `fit`, epoch, replica or trace."""

import collections
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, GradientTelemetry, microbatch

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X[:, :1]


class LargestSeen(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.largest.assign(ops.max(inputs))
        return inputs


def sequential(*middle):
    return keras.Sequential([keras.Input((4,)), *middle, layers.Dense(1)])


def windows():
    """The statistics of each micro-batch."""
    model = sequential(layers.BatchNormalization())
    model.compile(AccumulatingOptimizer("sgd", 2), "mse")
    return lambda: model.fit(X, Y, batch_size=6, epochs=2, verbose=0, callbacks=[ExactAccumulation()])


def replicas():
    """The statistics of each replica."""
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        model = sequential(layers.BatchNormalization())
        model.compile("sgd", "mse")
    return lambda: dist.fit(model, X, Y, batch_size=6, epochs=2, verbose=0)


def slices():
    """A state, in batches of two numbers of rows, traced twice."""
    model = sequential(LargestSeen())
    model.compile("sgd", "mse")
    microbatch(model, 4, weighting="examples")
    return lambda: model.fit(X, Y, batch_size=6, epochs=2, verbose=0)


def telemetry():
    """No update is reported."""
    model = sequential()
    model.compile("sgd", "mse")
    callback = GradientTelemetry(every=1000)
    return lambda: model.fit(X, Y, verbose=0, callbacks=[callback])


@pytest.mark.few(0, "slices", "windows")
@pytest.mark.parametrize("make", [windows, replicas, slices, telemetry])
def test_is_said_once(make, caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = make()
        for _ in range(2):
            fit()
    # At a line of the user's, who can act on it there.
    assert not any("/keras_paragrad/" in each.filename for each in caught if each.category is UserWarning)
    # Without what names an update.
    messages = [str(each.message) for each in caught if each.category is UserWarning]
    messages += [record.getMessage().partition(":")[0] for record in caplog.records]
    assert messages and max(collections.Counter(messages).values()) == 1, messages
