"""Gradients of tables, which are kept as the rows that were looked up."""

import keras
import numpy as np
import pytest
from keras import layers
from oracles import gradient_error

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


@pytest.mark.parametrize("jit_compile", [False, True])
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
    (table, *_) = wrapped.per_example._results.gradients
    assert [tuple(rows.values.shape) for rows in table.places[3]] == [(ROWS, 3), (ROWS, 3, 3)]
