"""The physical batches of an update: how large they are, and which of them are computed."""

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from oracles.private_updates import CLASSES, FEATURES, by_hand, cross_entropy, draws_of, flat, some_data

from keras_paragrad.privacy import make_private
from keras_paragrad.privacy.sampling import PoissonSampling
from keras_paragrad.privacy.update import rows_of_update


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("most", [None, 2000, 512, 300, 64, 8])
@pytest.mark.parametrize(("examples", "expected"), [(60_000, 1024), (2048, 1024), (60_000, 16), (100, 100)])
def test_sizes(examples, expected, most, replicas):
    rate = expected / examples
    needed = int(scipy.stats.binom.isf(1e-20, examples, rate)) + 1
    rows, physical = rows_of_update(needed, expected, rate, most, replicas)
    assert needed <= rows < needed + physical
    assert rows % physical == 0
    assert physical % replicas == 0
    assert most is None or physical <= most
    usual = scipy.stats.binom.isf(1 / 30, examples, rate)
    # One draw in thirty needs more than the usual number, and less than a physical batch's rows are left over.
    computed = -(-usual // physical) * physical
    assert computed <= 1.15 * usual + 16 * replicas or (most or 8) < 16 * replicas or physical == most
    if most is None:
        assert usual <= physical or physical >= needed


def test_rows_that_replicas_cannot_divide():
    with pytest.raises(ValueError, match="can't be divided among 3 replicas. Write physical_batch_size=102"):
        rows_of_update(400, 256, 0.1, 100, 3)


def test_replicas_have_equal_shares_of_a_draw():
    """So that none computes more physical batches than others, and each begins with the rows that it has."""
    one, four = (PoissonSampling((1, 2), 50, 0.3, 40, replicas) for replicas in (1, 4))
    for first, second in ((one.draw(update), four.draw(update)) for update in range(50)):
        assert sorted(first.indices[first.present]) == sorted(second.indices[second.present])
        shares = second.present.reshape(4, 10)
        counts = shares.sum(1)
        assert np.ptp(counts) <= 1
        np.testing.assert_array_equal(shares, np.arange(10) < counts[:, None])


class Counting(keras.layers.Layer):
    """Counts its calls in training, and their rows, whatever the examples are."""

    def build(self, shape):
        self.calls, self.rows = (
            self.add_weight(name=name, shape=(), initializer="zeros", trainable=False) for name in ("calls", "rows")
        )

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
        return inputs


class Subclassed(keras.Model):
    """Which may need the number of rows while it is traced."""

    def __init__(self, layers):
        super().__init__()
        self.parts = layers

    def call(self, inputs, training=False):
        counting, dense = self.parts
        return dense(counting(inputs, training=training))


def private_and_reference(kind, examples=60, **settings):
    """A private model that counts, one like it that doesn't, the layer that counts, and the data."""
    x, y = some_data(examples)
    keras.utils.set_random_seed(0)
    counting, dense = Counting(), keras.layers.Dense(CLASSES, kernel_regularizer="l2")
    if kind == "subclassed":
        model = Subclassed([counting, dense])
        model(x[:1])
    else:
        static = settings["physical_batch_size"] if kind == "static" else None
        model = keras.Sequential([keras.Input((FEATURES,), batch_size=static), counting, dense])
    reference = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, kernel_regularizer="l2")])
    reference.set_weights(dense.get_weights())
    private = make_private(model, clip_norm=0.3, noise_multiplier=1e-3, delta=1e-3, seed=2, **settings)
    private.compile(keras.optimizers.SGD(0.5), cross_entropy(), jit_compile=kind == "jit")
    private.fit(x, y, verbose=0)
    assert private.privacy.rows()[1] == settings["physical_batch_size"]
    return private, reference, counting, dense, (x, y)


def check_by_hand(private, reference, dense, data):
    loss = cross_entropy(reduction="sum")
    by_hand(*(reference, private, keras.optimizers.SGD(0.5), private.privacy.updates, *data), clip=flat(0.3), loss=loss)
    for found, wanted in zip(dense.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("expected", [1, 12])
def test_physical_batches_without_drawn_rows_are_not_computed(expected):
    """And the update is that of all: with regularizers once, and a sum divided by the expected batch size."""
    private, reference, counting, *trained = private_and_reference(
        "any number", expected_batch_size=expected, physical_batch_size=4
    )
    padded, physical = private.privacy.rows()
    updates = private.privacy.updates
    taken = [max(1, -(-len(drawn) // physical)) for drawn in draws_of(private, updates)]
    assert len(set(taken)) > 1 or expected == 1
    assert int(counting.calls.numpy()) == sum(taken) < updates * padded // physical
    check_by_hand(private, reference, *trained)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["any number", "jit", "static", "subclassed"])
def test_rows_of_physical_batches_follow_the_draw_where_they_can(kind):
    """For XLA, and for models that aren't known to take any number, all have the same."""
    private, reference, counting, *trained = private_and_reference(
        kind, examples=120, expected_batch_size=40, physical_batch_size=32
    )
    drawn = [len(each) for each in draws_of(private, private.privacy.updates)]
    taken = [-(-number // 32) for number in drawn]
    rows = [each * 8 * -(-number // (8 * each)) for each, number in zip(taken, drawn, strict=True)]
    assert sum(drawn) < sum(rows) < 32 * sum(taken)
    assert int(counting.rows.numpy()) == (sum(rows) if kind == "any number" else 32 * sum(taken))
    check_by_hand(private, reference, *trained)


class Traced(keras.layers.Layer):
    """Notes the names of the functions in which it is traced."""

    def call(self, inputs):
        self.__dict__.setdefault("names", []).append(getattr(tf.compat.v1.get_default_graph(), "name", ""))
        return inputs


def test_nothing_is_traced_again():
    """Whatever is drawn, updates have one shape."""
    x, y = some_data()
    traced = Traced()
    model = keras.Sequential([keras.Input((FEATURES,)), traced, keras.layers.Dense(CLASSES)])
    private = make_private(
        model, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=6, delta=1e-3, seed=0, physical_batch_size=4
    )
    private.compile("sgd", cross_entropy(), jit_compile=False)
    private.fit(x, y, verbose=0)
    before = len(traced.names)
    private.fit(x, y, epochs=3, verbose=0)
    assert len(traced.names) == before
    assert len({len(drawn) for drawn in draws_of(private, 40)}) > 3


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["dense", "convolution", "metrics", "own metrics"])
def test_xla_compiles_the_loop_where_it_can(kind):
    """Convolutions are slower in it, and metrics are of the rows that are there, whose number XLA doesn't know."""
    x, y = some_data(24)
    traced = Traced()
    layers = [traced, keras.layers.Dense(CLASSES)]
    if kind == "convolution":
        inner = [keras.layers.Reshape((FEATURES, 1)), keras.layers.Conv1D(2, 2), keras.layers.Flatten()]
        layers.insert(0, keras.Sequential(inner))
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    if kind == "own metrics":
        model.compute_metrics = lambda *args, **kwargs: model.get_metrics_result()
    private = make_private(
        model, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=12, delta=1e-3, physical_batch_size=8
    )
    metrics = ["accuracy"] if kind == "metrics" else None
    private.compile("sgd", cross_entropy(), metrics=metrics, jit_compile=True)
    private.fit(x, y, verbose=0)
    # The innermost function is that of a slice, which a loop calls, or of a pass by itself.
    assert ("call" in traced.names[-1]) == (kind != "dense"), traced.names
