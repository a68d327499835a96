"""What Keras trains though there is nothing to differentiate or to cut: the components train it as Keras does."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles import largest_difference

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, GradientTelemetry, microbatch

X = np.random.default_rng(0).normal(size=(14, 5)).astype("float32")
Y = X[:, :2] - 1
NO_WEIGHTS = "does not have any trainable weights"


def make_frozen(optimizer="sgd"):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")])
    model.trainable = False
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, **arguments):
    with pytest.warns(UserWarning, match=NO_WEIGHTS):
        return model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0, **arguments).history


@pytest.mark.parametrize("way", ["slices", "one slice", "accumulation", "telemetry"])
def test_a_model_without_trainable_weights(way):
    model = make_frozen(AccumulatingOptimizer("sgd", steps=2) if way == "accumulation" else "sgd")
    callbacks = {"accumulation": [ExactAccumulation()], "telemetry": [GradientTelemetry()]}.get(way, [])
    size = {"slices": 3, "one slice": 7}.get(way)
    with microbatch(model, size) if size else contextlib.nullcontext():
        history = fit(model, callbacks=callbacks)
    for name, values in fit(make_frozen()).items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.own_process
def test_a_model_without_trainable_weights_on_replicas(mirrored):
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        model = make_frozen()
    dist.prepare(model)
    history = fit(model)
    for name, values in fit(make_frozen()).items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


class Lookup(keras.layers.Layer):
    """A linear layer of sparse inputs."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 2), initializer="ones")

    def call(self, inputs):
        if isinstance(inputs, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(inputs, self.kernel)
        return keras.ops.matmul(inputs, self.kernel)


@pytest.mark.parametrize("size", [3, 7])
def test_slices_of_sparse_inputs(size):
    rows = X[:7] * (X[:7] > 0)

    def train(slices):
        model = keras.Sequential([keras.Input((5,), sparse=True), Lookup()])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensors((tf.sparse.from_dense(rows), Y[:7]))
        with microbatch(model, size) if slices else contextlib.nullcontext():
            history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return model, history["loss"]

    (sliced, losses), (whole, expected) = train(True), train(False)
    assert largest_difference(sliced, whole) < 1e-6
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_what_is_not_cut_is_not_weighed():
    """A loss of one number can't be weighed, which a batch that is one slice does not need."""

    def train(slices):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred)))
        data = tf.data.Dataset.from_tensors((X, Y))
        with microbatch(model, 14) if slices else contextlib.nullcontext():
            model.fit(data, epochs=2, shuffle=False, verbose=0)
        return model

    assert largest_difference(train(True), train(False)) == 0
