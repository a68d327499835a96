"""Sums in blocks and columns are sums."""

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_paragrad.sums import row_sums

# Up to the last number, whatever of it fills blocks, columns and neither.
SIZES = [1, 127, 128, 2048, 2048 * 64, 2048 * 64 + 64, 2048 * 70 + 999]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("by_xla", [False, True])
def test_every_number_counts_once(size, by_xla):
    values = np.random.default_rng(size).integers(-8, 9, (3, size)).astype("float32")
    found = tf.function(lambda rows: row_sums(rows, by_xla), jit_compile=by_xla)(values)
    np.testing.assert_array_equal(found, values.sum(1, dtype="int64"))


@given(st.lists(st.integers(1, 40), max_size=3), st.integers(0, 3), st.booleans())
def test_rows_of_any_shape(sizes, rows, by_xla):
    values = np.random.default_rng(0).integers(-8, 9, (rows, *sizes)).astype("float32")
    np.testing.assert_array_equal(
        row_sums(tf.constant(values), by_xla), values.reshape(rows, int(np.prod(sizes))).sum(1)
    )


def test_rows_whose_size_is_not_known():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def sums(rows):
        return row_sums(rows, by_xla=True)

    np.testing.assert_array_equal(sums(tf.ones([2, 300])), [300, 300])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays(value):
    values = np.ones((2, 2048 * 64), "float32")
    values[0, 5] = value
    found = tf.function(lambda rows: row_sums(rows, by_xla=True), jit_compile=True)(values)
    np.testing.assert_array_equal(found, [value, 2048 * 64])
