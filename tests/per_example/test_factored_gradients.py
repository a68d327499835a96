"""Gradients that are kept as what they are made of, until they are read."""

import keras
import numpy as np
import pytest
from keras import layers
from oracles.whole_batches import gradient_error

from keras_paragrad import per_example_gradients, wrap

WORDS, ROWS = 5, 4


def make_model(length=None):
    keras.utils.set_random_seed(2)
    words = keras.Input((length,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, 3)(words))
    return keras.Model(words, layers.Dense(2)(hidden))


def batch(length, rows=ROWS):
    generator = np.random.default_rng(length)
    return generator.integers(-WORDS, WORDS, (rows, length)), generator.normal(size=(rows, 2))


def error(wrapped, model, x, y):
    found = wrapped.per_example.gradients
    assert [each.shape for each in found] == [(len(x), *variable.shape) for variable in model.trainable_variables]
    return gradient_error(found, per_example_gradients(model, x, y, "mse"))


def kept_shapes(wrapped):
    """For each weight, the shapes of the parts that the last step left."""
    kept = wrapped.per_example._results.gradients
    return [[tuple(rows.values.shape) for rows in each.buffers[int(each.index.numpy())].rows] for each in kept]


# XLA compiles a step for each length, below too.
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_batches_of_several_lengths(jit_compile):
    model = make_model()
    wrapped = wrap(model, quantity="gradients", capacity=ROWS if jit_compile else None)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile)
    # Of fewer words than the table has and of more, and again those for which a step was compiled before.
    for length in (3, 4, 2, 7, 3, 8, 4):
        x, y = batch(length)
        wrapped.train_on_batch(x, y)
        assert error(wrapped, model, x, y) < 1e-6, length


@pytest.mark.parametrize("jit_compile", [False, True])
def test_there_are_none_before_the_first_step(jit_compile):
    wrapped = wrap(make_model(3), quantity="gradients", capacity=ROWS if jit_compile else None)
    assert [each.shape for each in wrapped.per_example.gradients] == [
        (0, *variable.shape) for variable in wrapped.trainable_variables
    ]


def test_a_table_is_not_made_for_every_example():
    wrapped = wrap(make_model(3), quantity="gradients", capacity=ROWS)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=True)
    wrapped.train_on_batch(*batch(3))
    assert kept_shapes(wrapped)[0] == [(ROWS, 3), (ROWS, 3, 3)]


def dense_model(length=None):
    keras.utils.set_random_seed(3)
    wide = [layers.Dense(20, activation="tanh"), layers.EinsumDense("btx,xy->bty", (None, 20), bias_axes="y")]
    hidden = keras.Sequential(wide)(inputs := keras.Input((length, 30)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_kernels_of_sequences_of_several_lengths(jit_compile):
    model = dense_model()
    wrapped = wrap(model, quantity="gradients", capacity=ROWS if jit_compile else None)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile)
    generator = np.random.default_rng(0)
    # Of so few positions that their sides are smaller than a kernel, of more, and again of few.
    # XLA compiles a step for each.
    for length in (1, 12, 1) if jit_compile else (1, 12, 3, 12, 1):
        x, y = generator.normal(size=(ROWS, length, 30)), generator.normal(size=(ROWS, 2))
        wrapped.train_on_batch(x, y)
        assert error(wrapped, model, x, y) < 1e-6, length


@pytest.mark.parametrize("jit_compile", [False, True])
def test_kernels_are_kept_as_the_sides_of_products_where_those_are_small(jit_compile):
    model = keras.Sequential([keras.Input((40,)), layers.Dense(30), layers.Dense(1)])
    wrapped = wrap(model, quantity="gradients", capacity=ROWS)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(ROWS, 40)), generator.normal(size=(ROWS, 1))
    wrapped.train_on_batch(x, y)
    large, bias, small, _ = kept_shapes(wrapped)
    assert large == [(ROWS, 1, 1, 40), (ROWS, 1, 1, 30)]
    assert (bias, small) == ([(ROWS, 30)], [(ROWS, 30, 1)])
    assert error(wrapped, model, x, y) < 1e-6


def test_without_fixed_shapes_all_lengths_share_a_place():
    wrapped = wrap(dense_model(), quantity="gradients")
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    for length in (1, 2, 12, 13, 14):
        wrapped.train_on_batch(np.ones((ROWS, length, 30)), np.ones((ROWS, 2)))
    # One for the sides of products, and one for kernels.
    assert [len(each.buffers) for each in wrapped.per_example._results.gradients] == [2, 1, 2, 1, 1, 1]


def test_sides_in_float64():
    model = keras.Sequential([keras.Input((40,), dtype="float64"), layers.Dense(30, dtype="float64")])
    wrapped = wrap(model, quantity="gradients")
    wrapped.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.random.default_rng(0).normal(size=(ROWS, 40)), np.ones((ROWS, 30))
    wrapped.train_on_batch(x, y)
    assert {gradients.dtype for gradients in wrapped.per_example.gradients} == {np.dtype("float32")}
    assert error(wrapped, model, x, y) < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_kernels_of_few_windows(jit_compile):
    keras.utils.set_random_seed(4)
    # Windows of few channels and of more are laid out in different ways.
    wide = [layers.Conv2D(12, 3, strides=3), layers.Conv2D(10, 3, strides=2, padding="same")]
    model = keras.Sequential([keras.Input((6, 6, 8)), *wide, layers.GlobalAveragePooling2D(), layers.Dense(2)])
    wrapped = wrap(model, quantity="gradients", capacity=ROWS)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(ROWS, 6, 6, 8)), generator.normal(size=(ROWS, 2))
    wrapped.train_on_batch(x, y)
    assert [len(parts) for parts in kept_shapes(wrapped)] == [2, 1, 2, 1, 2, 1]
    assert error(wrapped, model, x, y) < 1e-6
