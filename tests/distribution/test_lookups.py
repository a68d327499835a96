"""Lookups on two replicas: those for each example are each replica's, and those for all, as of positions, are added."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit

LENGTH = 4
generator = np.random.default_rng(0)
X, Y = generator.integers(1, 6, (24, LENGTH)), generator.normal(size=(24, LENGTH, 1)).astype("float32")
ops = keras.ops


class Lookups(keras.layers.Layer):
    """Tokens, and what `look_up(table, tokens)` looks up in a table of its own or, if `shared`, in the same one."""

    def __init__(self, look_up, shared=False):
        super().__init__()
        self.look_up, self.tokens = look_up, keras.layers.Embedding(8, 3)
        self.table = self.tokens if shared else keras.layers.Embedding(8, 3)
        self.numbers = self.add_weight(shape=(5, 2), dtype="int32", trainable=False, initializer="zeros")
        self.numbers.assign(np.arange(10).reshape(5, 2) % 7)
        self.constant = tf.constant([3, 1, 3, 0])

    def build(self, shape):
        self.tokens.build()
        self.table.build()

    def call(self, tokens):
        return ops.tanh(self.tokens(tokens) + self.look_up(self, tokens))


def positions(layer, tokens):
    return layer.table(ops.arange(ops.shape(tokens)[1]))


def with_an_axis(layer, tokens):
    return layer.table(ops.expand_dims(ops.arange(LENGTH), 0))


def for_each(layer, tokens):
    return layer.table(ops.broadcast_to(ops.arange(LENGTH), ops.shape(tokens)))


def of_a_mask(layer, tokens):
    return layer.table(ops.cumsum(ops.cast(tokens > 2, "int32"), 1))


def of_a_variable(layer, tokens):
    return ops.mean(layer.table(layer.numbers))


def of_a_constant(layer, tokens):
    return layer.table(layer.constant)


def in_a_function(layer, tokens):
    @tf.function(autograph=False)
    def looked_up():
        return layer.table(tf.range(LENGTH)) + layer.table(tf.constant([0, 0, 1, 1]))

    return looked_up()


def model_of(look_up, shared=False, length=LENGTH, **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(Lookups(look_up, shared)(inputs)))
    # It clips and squares each lookup.
    model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.05), "mse", **options)
    return model


def train(fit, rows=24, size=8):
    fit(x=X[:rows], y=Y[:rows], batch_size=size, epochs=2, shuffle=False, verbose=0)


@pytest.mark.own_process(seconds=200)
@pytest.mark.parametrize(
    ("look_up", "options"),
    [
        pytest.param(positions, {}, id="positions"),
        pytest.param(positions, {"length": None}, id="length-unknown"),
        pytest.param(positions, {"shared": True, "length": None}, id="shared"),
        pytest.param(positions, {"shared": True, "jit_compile": True}, id="shared-jit"),
        pytest.param(with_an_axis, {}, id="axis"),
        pytest.param(for_each, {}, id="for-each"),
        pytest.param(of_a_mask, {"shared": True}, id="mask"),
        pytest.param(of_a_variable, {}, id="variable"),
        pytest.param(of_a_constant, {"jit_compile": True}, id="constant-jit"),
        pytest.param(in_a_function, {}, id="function"),
    ],
)
# Of 24 rows the batches have a static size; of 23 they don't, and the last one's halves differ.
@pytest.mark.parametrize("rows", [24, 23])
def test_steps_are_those_of_one_device(look_up, options, rows, mirrored):
    plain = model_of(look_up, **{**options, "jit_compile": False}, run_eagerly=True)
    train(plain.fit, rows)
    dist = DistributedFit(mirrored)
    with dist.scope():
        ours = model_of(look_up, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(functools.partial(dist.fit, ours), rows)
    assert largest_difference(ours, plain) < 1e-6
