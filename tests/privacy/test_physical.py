"""The physical batches of an update: how large they are, and which of them are computed."""

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from privacy_oracle import CLASSES, FEATURES, by_hand, cross_entropy, draws_of, flat, some_data

from keras_paragrad.privacy import make_private
from keras_paragrad.privacy.physical import rows_of_update
from keras_paragrad.privacy.sampling import PoissonSampling


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
    usual = scipy.stats.binom.isf(0.01, examples, rate)
    # One draw in a hundred needs more than the usual number, and less than a physical batch's rows are left over.
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
    for first, second in zip(one.draws(0, 50), four.draws(0, 50), strict=True):
        assert sorted(first.numbers[first.present]) == sorted(second.numbers[second.present])
        shares = second.present.reshape(4, 10)
        counts = shares.sum(1)
        assert np.ptp(counts) <= 1
        np.testing.assert_array_equal(shares, np.arange(10) < counts[:, None])


class Counting(keras.layers.Layer):
    """Counts its calls in training, whatever the examples are."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


@pytest.mark.parametrize("expected", [1, 12])
def test_physical_batches_without_drawn_rows_are_not_computed(expected):
    """And the update is that of all: with regularizers once, and a sum divided by the expected batch size."""
    x, y = some_data()
    keras.utils.set_random_seed(0)
    counting = Counting()
    layers = [keras.Input((FEATURES,)), counting, keras.layers.Dense(CLASSES, kernel_regularizer="l2")]
    model = keras.Sequential(layers)
    reference = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, kernel_regularizer="l2")])
    reference.set_weights(model.layers[-1].get_weights())
    private = make_private(
        *(model,),
        clip_norm=0.3,
        noise_multiplier=1e-3,
        expected_batch_size=expected,
        delta=1e-3,
        physical_batch_size=4,
        seed=2,
    )
    private.compile(keras.optimizers.SGD(0.5), cross_entropy(), jit_compile=False)
    private.fit(x, y, verbose=0)
    padded, physical = private.privacy.rows()
    updates = private.privacy.updates
    taken = [max(1, -(-len(drawn) // physical)) for drawn in draws_of(private, updates)]
    assert physical == 4
    assert len(set(taken)) > 1 or expected == 1
    assert int(counting.calls.numpy()) == sum(taken) < updates * padded // physical
    loss = cross_entropy(reduction="sum")
    by_hand(reference, private, keras.optimizers.SGD(0.5), updates, x, y, clip=flat(0.3), loss=loss)
    for found, wanted in zip(model.layers[-1].get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_nothing_is_traced_again():
    """Whatever is drawn, updates have one shape."""
    x, y = some_data()
    traced = []

    class Traced(keras.layers.Layer):
        def call(self, inputs):
            if isinstance(inputs, tf.Tensor) and not tf.executing_eagerly():
                traced.append(inputs.shape)
            return inputs

    model = keras.Sequential([keras.Input((FEATURES,)), Traced(), keras.layers.Dense(CLASSES)])
    private = make_private(
        model, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=6, delta=1e-3, seed=0, physical_batch_size=4
    )
    private.compile("sgd", cross_entropy(), jit_compile=False)
    private.fit(x, y, verbose=0)
    before = len(traced)
    private.fit(x, y, epochs=3, verbose=0)
    assert len(traced) == before
    assert len({len(drawn) for drawn in draws_of(private, 40)}) > 3
