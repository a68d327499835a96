"""Which calls of layers are found to depend on other rows, however little."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from keras_paragrad import DistributedFit
from keras_paragrad.engine.proof.call_trials import CallTrials, untried_layers


class RowWise(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.slow = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False, name="slow")

    def call(self, x):
        return ops.tanh(ops.matmul(x, ops.ones((3, 3))))


class Mean(RowWise):
    def call(self, x):
        return x + 1e-4 * ops.mean(x, axis=0)


class Before(RowWise):
    def call(self, x):
        return x + 1e-4 * ops.cumsum(x, axis=0)


class Slow(RowWise):
    def call(self, x):
        self.slow.assign(0.9999 * self.slow + 0.0001 * ops.mean(x, axis=0))
        return x


class Counted(RowWise):
    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Filled(RowWise):
    """Returns zeros for the whole batch, and ones for a part."""

    def call(self, x):
        return 0.0 * x + ops.cast(ops.shape(x)[0] < 4, "float32")


@pytest.mark.parametrize("kind", [RowWise, Mean, Before, Slow, Counted, Filled])
def test_finds_layers_that_mix_rows_a_little(kind):
    class Stepping(keras.Model):
        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.layer(data))}

    model = Stepping()
    model.layer = kind()
    model.layer.build((None, 3))
    rows = tf.constant(np.random.default_rng(0).normal(size=(7, 3)), "float32")
    assert (id(model.layer) in CallTrials(model, model.train_step, rows).find()) == (kind is not RowWise)


class Scaling(RowWise):
    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x):
        return self.scale * x


def test_a_step_that_moves_weights_and_differentiates_there_can_be_tried():
    """As sharpness-aware minimization does: what is assigned has to be a source of a tape."""

    class Moving(keras.Model):
        def train_step(self, data):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self.layer(data)))
                (gradient,) = tape.gradient(loss, self.layer.trainable_weights)
                self.layer.scale.assign_add(gradient)
            return {"loss": loss}

    model = Moving()
    model.layer = Scaling()
    model.layer.build((None, 3))
    assert CallTrials(model, model.train_step, tf.ones((7, 3))).find() == {}
    assert np.array_equal(model.layer.scale, np.ones(3))


@pytest.mark.own_process
def test_layers_of_keras_are_known_in_shards(mirrored):
    dist = DistributedFit(mirrored, shard="parameters", min_shard_bytes=1)
    with dist.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    dist.prepare(model)
    assert untried_layers(model) == {}
