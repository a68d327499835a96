"""Losses that compare the examples of a batch, or divide by what isn't known, are those of one device."""

import itertools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import largest_difference
from sample_models.comparing_losses import LOSSES, SupCon

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch

TOLERANCE = 1e-6
generator = np.random.default_rng(0)
X = generator.normal(size=(30, 6)).astype("float32")
Y = generator.integers(0, 3, 30).astype("float32")
TOKENS = generator.integers(0, 5, (30, 4))


def length(y, z):
    return ops.norm(z, axis=-1)


def encoder(*more, loss=None, **arguments):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential([keras.Input((6,)), hidden, *more, layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss or SupCon(), metrics=[length], **arguments)
    return model


class Moving(keras.losses.Loss):
    """Has a state of its own."""

    def __init__(self):
        super().__init__()
        self.center = keras.Variable(np.zeros(4, "float32"), trainable=False)

    def call(self, y, z):
        values = ops.sum(ops.square(z - self.center), axis=-1)
        self.center.assign(0.5 * self.center + 0.5 * ops.mean(ops.stop_gradient(z), axis=0))
        return values


class Centered(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class Views(layers.Layer):
    """Two views of each example, as rows."""

    def call(self, inputs):
        return ops.concatenate([inputs, -2 * inputs], axis=0)


def of_views(y, z):
    return ops.mean(ops.logsumexp(ops.matmul(z, ops.transpose(z)), axis=1))


def masked_words(**arguments):
    keras.utils.set_random_seed(0)
    words = layers.Embedding(5, 6, mask_zero=True)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), words, layers.Dense(3)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), of_words, **arguments)
    return model


def of_words(y, z):
    return SupCon().call(y[:, 0], ops.mean(z, axis=1))[:, None] * ops.ones_like(z[..., 0])


CASES = {
    **{name: (lambda loss=loss, **how: encoder(loss=loss(), **how), X, Y) for name, loss in LOSSES.items()},
    "a loss with a state": (lambda **how: encoder(loss=Moving(), **how), X, Y),
    "views as rows": (lambda **how: encoder(Views(), loss=of_views, **how), X, Y),
    "masks": (masked_words, TOKENS, np.repeat(Y[:, None], 4, 1)),
}


def check(name, batch_size=12, rows=25, size=None, dist=None, **mode):
    """Compares weights, logs and evaluation with those of one device."""
    make, x, y = CASES[name]

    fit = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    fit |= {"validation_data": (x[:7], y[:7]), "validation_batch_size": 4}
    data = x[:rows], y[:rows]
    whole = make(run_eagerly=True)
    expected = whole.fit(*data, **fit).history
    if dist:
        with dist.scope():
            model = make(**mode)
    else:
        model = make(**mode)
    if size:
        microbatch(model, size)
    history = (dist.fit(model, *data, **fit) if dist else model.fit(*data, **fit)).history
    assert largest_difference(model, whole) < TOLERANCE
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.few(2, "hardest triplets", "masks")
@pytest.mark.parametrize("name", CASES)
def test_in_slices(name):
    check(name, size=5, jit_compile=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": True}], ids=["eager", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_in_slices_in_other_modes(name, mode):
    check(name, size=5, **mode)


# The last batch has one row, so that a replica has none.
@pytest.mark.few(0, "pairs-None-how1")
@pytest.mark.own_process
@pytest.mark.parametrize("how", [{}, {"shard": "parameters", "min_shard_bytes": 16}, {"jit": True}])
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("name", CASES)
def test_on_replicas(name, size, how):
    check(name, size=size, dist=DistributedFit("mirrored", ["CPU:0", "CPU:1"], **how))


def test_it_says_so_once(caplog):
    caplog.set_level(logging.INFO, "keras_paragrad")
    model = encoder()
    with microbatch(model, 5):
        for _ in range(2):
            model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
    (said,) = [record.getMessage() for record in caplog.records if "only calls of layers" in record.getMessage()]
    assert "The loss of" in said


class Unseeded(keras.Model):
    """Of whose calls none can be divided: it draws numbers that a second run can't draw again."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, use_bias=False)
        self.dense.build((None, 6))

    def call(self, inputs):
        return tf.matmul(inputs + tf.random.normal(tf.shape(inputs)), tf.convert_to_tensor(self.dense.kernel))


def test_a_step_of_which_nothing_divides_is_refused_but_for_one_slice():
    def fitted(rows):
        model = Unseeded()
        model.compile("sgd", SupCon(), jit_compile=False)
        with microbatch(model, 8):
            model.fit(tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(rows), shuffle=False, verbose=0)

    fitted(8)
    with pytest.raises(ValueError, match="Nothing can be divided.*draws random numbers.*recompute"):
        fitted(12)


class Partners(layers.Layer):
    """Adds to each row the one that it names by its place in the batch."""

    def call(self, inputs, places):
        return inputs + ops.take(inputs, places, axis=0)


def of_partners():
    keras.utils.set_random_seed(0)
    rows, places = keras.Input((6,)), keras.Input((), dtype="int32")
    hidden = Partners()(layers.Dense(8, activation="tanh")(rows), places)
    model = keras.Model([rows, places], layers.Dense(4)(hidden))
    model.compile(keras.optimizers.SGD(0.05), SupCon(), jit_compile=False)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize(("partners", "first", "prove"), [(False, 4, True), (True, 12, True)])
def test_layers_that_were_not_tried_get_whole_batches(partners, first, prove):
    """In a first batch of one slice, and where a few rows can't be computed."""
    cuts = [0, first, first + 12, 30]
    # The last row names the first one, and the others the next.
    places = [np.roll(np.arange(end - begin), -1).astype("int32") for begin, end in itertools.pairwise(cuts)]

    def batches():
        for begin, end, place in zip(cuts, cuts[1:], places, strict=False):
            yield ((X[begin:end], place) if partners else X[begin:end]), Y[begin:end]

    rows = tf.TensorSpec((None, 6))
    signature = (rows, tf.TensorSpec((None,), tf.int32)) if partners else rows
    data = tf.data.Dataset.from_generator(batches, output_signature=(signature, tf.TensorSpec((None,))))
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    whole, model = (of_partners() if partners else encoder(Centered(), jit_compile=False) for _ in range(2))
    microbatch(model, 5, prove=prove)
    for each in (whole, model):
        each.fit(data, shuffle=False, verbose=0)
    assert largest_difference(model, whole) < TOLERANCE


def test_windows_refuse_a_loss_with_a_state():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    model.compile(AccumulatingOptimizer("sgd", 2), Moving())
    with pytest.raises(ValueError, match="assigns variables, which each part of a batch would change in turn"):
        model.fit(X[:24], Y[:24], batch_size=12, verbose=0, callbacks=[ExactAccumulation()])


@pytest.mark.parametrize("weighting", ["auto", "uniform"])
def test_windows_are_refused(weighting):
    """Micro-batches of a window are not there at the same time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    model.compile(AccumulatingOptimizer("sgd", 2, weighting=weighting), SupCon())
    with microbatch(model, 5), pytest.raises(ValueError, match=r"microbatch\(model, size=\.\.\.\)"):
        model.fit(X[:24], Y[:24], batch_size=12, verbose=0, callbacks=[ExactAccumulation()])
