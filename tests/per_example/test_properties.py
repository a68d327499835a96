"""What holds whatever the model is."""

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.whole_batches import gradient_error, norms_of
from sample_models.drawn_layers import randomize, some_inputs

from keras_paragrad import per_example_gradients, per_example_norms
from keras_paragrad.per_example.rules.linear import Product

MODELS = {
    "dense": lambda: [layers.Dense(5, activation="tanh"), layers.Flatten(), layers.Dense(2)],
    "convolution": lambda: [
        layers.Conv1D(4, 2, activation="silu"),
        layers.GroupNormalization(2),
        layers.Flatten(),
        layers.Dense(2),
    ],
    "recurrent": lambda: [
        layers.SimpleRNN(3, return_sequences=True),
        layers.LayerNormalization(),
        layers.Flatten(),
        layers.Dense(2),
    ],
}


def make_model(kind):
    model = keras.Sequential([keras.Input((6, 4)), *MODELS[kind]()])
    randomize(model)
    return model


def data(rows=9):
    generator = np.random.default_rng(5)
    return some_inputs((rows, 6, 4)), generator.normal(size=(rows, 2)).astype("float32")


@pytest.mark.parametrize("kind", MODELS)
def test_the_sum_is_the_gradient_of_the_batch(kind):
    model, (x, y) = make_model(kind), data()
    weight = np.linspace(0, 2, len(x)).astype("float32")
    with tf.GradientTape() as tape:
        loss = keras.losses.MeanSquaredError(reduction="sum_over_batch_size")(y, model(x), sample_weight=weight)
    theirs = [g.numpy() for g in tape.gradient(loss, [variable.value for variable in model.trainable_variables])]
    ours = per_example_gradients(model, x, y, "mse", weight)
    assert gradient_error([gradient.mean(0) for gradient in ours], theirs, norms_of(ours).max()) < 1e-6
    assert norms_of(ours)[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", MODELS)
def test_neither_order_nor_company_matters(kind):
    model, (x, y) = make_model(kind), data()
    whole = per_example_gradients(model, x, y, "mse")
    order = np.random.default_rng(6).permutation(len(x))
    shuffled = per_example_gradients(model, x[order], y[order], "mse")
    in_parts = per_example_gradients(model, x, y, "mse", batch_size=4)
    assert gradient_error(shuffled, [gradient[order] for gradient in whole]) < 1e-6
    assert gradient_error(in_parts, whole) < 1e-6
    assert (
        np.abs(per_example_norms(model, x, y, "mse", batch_size=2) - norms_of(whole)).max()
        < 1e-6 * norms_of(whole).max()
    )


@pytest.mark.parametrize("kind", MODELS)
def test_equal_examples_have_equal_gradients(kind):
    model, (x, y) = make_model(kind), data()
    ours = per_example_gradients(model, np.repeat(x[:1], 5, 0), np.repeat(y[:1], 5, 0), "mse")
    assert gradient_error(ours, [np.repeat(gradient[:1], 5, 0) for gradient in ours]) < 1e-6


@hypothesis.given(
    groups=st.integers(1, 3),
    positions=st.integers(1, 20),
    # Of 128 and more, sums for XLA are taken in columns.
    rows=st.one_of(st.integers(0, 30), st.integers(128, 300)),
    columns=st.integers(1, 30),
    by_xla=st.booleans(),
)
@hypothesis.example(groups=2, positions=1, rows=0, columns=3, by_xla=False)
@hypothesis.example(groups=2, positions=1, rows=200, columns=3, by_xla=True)
def test_ghost_norms_are_direct_norms(groups, positions, rows, columns, by_xla):
    generator = np.random.default_rng(7)
    left, right = (
        tf.constant(generator.normal(size=(3, groups, positions, size)), tf.float32) for size in (rows, columns)
    )
    product = Product(left, right)
    alike = tf.matmul(left, left, transpose_b=True) * tf.matmul(right, right, transpose_b=True)
    direct = norms_of([product.gradients().numpy()])
    np.testing.assert_allclose(np.sqrt(tf.reduce_sum(alike, [1, 2, 3])), direct, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(product.squared_norms(by_xla)), direct, rtol=1e-5)
