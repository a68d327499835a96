"""*Combine* asks each variable's layout what becomes of its gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
from keras_paragrad._keras.replicas.layout import lay_out

X = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")
Y = X[:, :1] ** 2


class Scattered:
    """A reduce-scatter of rows, and an all-gather: each replica sums one part of each gradient."""

    def __init__(self):
        self.shapes = []

    def combine(self, gradients):
        self.shapes = [tuple(gradient.shape) for gradient in gradients]
        return tf.distribute.get_replica_context().merge_call(self._scatter_and_gather, args=(list(gradients),))

    def _scatter_and_gather(self, _, grouped):
        return [self._summed(*gradient.values) for gradient in grouped]

    def _summed(self, first, second):
        rows = first.shape[0] // 2
        return tf.concat([first[:rows] + second[:rows], first[rows:] + second[rows:]], 0)


def made(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer(), "mse")
    return model


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


@pytest.mark.own_process
def test_on_replicas():
    dist = DistributedFit(devices=["CPU:0", "CPU:1"], jit=False)
    for optimizer, callbacks in ((adam, []), (lambda: AccumulatingOptimizer(adam(), 2), [ExactAccumulation()])):
        settings = {"batch_size": 5 if callbacks else 10, "shuffle": False, "epochs": 2, "verbose": 0}
        alone = made(adam)
        alone.fit(X, Y, **{**settings, "batch_size": 10})
        with dist.scope():
            model = made(optimizer)
        layout = Scattered()
        lay_out([layer.kernel for layer in model.layers], layout)
        dist.fit(model, X, Y, callbacks=callbacks, **settings)
        # Biases stay with the replicated ones.
        assert layout.shapes == [(6, 4), (4, 1)]
        for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
