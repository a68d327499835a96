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
    """Tokens, and what each of `look_ups` looks up, in a table of its own or, if `shared`, in that of tokens."""

    def __init__(self, look_ups, shared=False):
        super().__init__()
        self.look_ups, self.tokens = look_ups, keras.layers.Embedding(8, 3)
        self.tables = [self.tokens if shared else keras.layers.Embedding(8, 3) for _ in look_ups]
        self.numbers = self.add_weight(shape=(5, 2), dtype="int32", trainable=False, initializer="zeros")
        self.numbers.assign(np.arange(10).reshape(5, 2) % 7)
        self.constant = tf.constant([3, 1, 3, 0])

    def build(self, shape):
        for table in (self.tokens, *self.tables):
            table.build()

    def call(self, tokens):
        pairs = zip(self.look_ups, self.tables, strict=True)
        return ops.tanh(sum((look_up(self, table, tokens) for look_up, table in pairs), self.tokens(tokens)))


def positions(layer, table, tokens):
    return table(ops.arange(ops.shape(tokens)[1]))


def with_an_axis(layer, table, tokens):
    return table(ops.expand_dims(ops.arange(LENGTH), 0))


def for_each(layer, table, tokens):
    return table(ops.broadcast_to(ops.arange(LENGTH), ops.shape(tokens)))


def of_a_mask(layer, table, tokens):
    return table(ops.cumsum(ops.cast(tokens > 2, "int32"), 1))


def of_a_variable(layer, table, tokens):
    return ops.mean(table(layer.numbers))


def of_a_constant(layer, table, tokens):
    return table(layer.constant)


def in_a_function(layer, table, tokens):
    @tf.function(autograph=False)
    def looked_up():
        return table(tf.range(LENGTH)) + table(tf.constant([0, 0, 1, 1]))

    return looked_up()


KINDS = [positions, with_an_axis, for_each, of_a_mask, of_a_variable, of_a_constant, in_a_function]


def model_of(look_ups, shared=False, length=LENGTH, **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(Lookups(look_ups, shared)(inputs)))
    # It clips and squares each lookup.
    model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.05), "mse", **options)
    return model


def train(fit, rows=24, size=8):
    fit(x=X[:rows], y=Y[:rows], batch_size=size, epochs=2, shuffle=False, verbose=0)


def trained(mirrored, look_ups, rows, size=8, **options):
    """A model on one device, and one on replicas."""
    plain = model_of(look_ups, **options | {"jit_compile": False, "run_eagerly": True})
    train(plain.fit, rows, size)
    dist = DistributedFit(mirrored)
    with dist.scope():
        ours = model_of(look_ups, **options)
    train(functools.partial(dist.fit, ours), rows, size)
    return plain, ours


@pytest.mark.few(0, "compiled")
@pytest.mark.own_process(seconds=200)
@pytest.mark.parametrize(
    ("look_ups", "rows", "options"),
    [
        # Of 24 rows the batches have a static size; of 23 they don't, and the last one's halves differ.
        pytest.param(KINDS, 24, {}, id="apart"),
        pytest.param(KINDS, 23, {"shared": True, "length": None}, id="shared"),
        pytest.param([positions, of_a_constant], 23, {"shared": True, "jit_compile": True}, id="compiled"),
    ],
)
def test_steps_are_those_of_one_device(look_ups, rows, options, mirrored):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain, ours = trained(mirrored, look_ups, rows, **options)
    assert largest_difference(ours, plain) < 1e-6


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
def test_what_is_not_known_is_said(mirrored):
    # With one row on each replica, an axis of 1 may be that of the rows.
    with pytest.warns(UserWarning, match=r"Whether \S+/embeddings is looked up once.*ops.arange"):
        plain, ours = trained(mirrored, [for_each, with_an_axis], 4, 2)
    assert largest_difference(ours, plain) < 1e-6
    with pytest.warns(UserWarning, match="leave run_eagerly=True out"):
        trained(mirrored, [positions], 4, 4, run_eagerly=True)
