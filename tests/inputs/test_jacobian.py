"""The Jacobian of each row, in every mode, is that of a tape around that row alone."""

import itertools

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given

from keras_paragrad.inputs.gradients import input_gradients
from keras_paragrad.inputs.jacobian import input_jacobian

TOLERANCE = 1e-6
layers = keras.layers


def dense(inputs, outputs):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(6, "tanh"), layers.Dense(outputs)])


def convolutional(outputs):
    return keras.Sequential(
        [
            keras.Input((5, 4, 2)),
            layers.Conv2D(3, 3, activation="silu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(outputs),
        ]
    )


def attending():
    x = keras.Input((4, 2))
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(x, x) + x)
    return keras.Model(x, layers.Dense(3)(hidden))


def recurrent():
    return keras.Sequential([keras.Input((3, 2)), layers.SimpleRNN(4), layers.Dense(7)])


MODELS = {
    "few inputs": lambda: dense(2, 9),
    "few outputs": lambda: dense(7, 3),
    "convolution": lambda: convolutional(4),
    "attention": attending,
    "recurrence": recurrent,
}


def rows(model, count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *model.input_shape[1:])).astype("float32")


def reference(model, x, function=lambda outputs: outputs):
    """A tape around each row, and another backward pass for each output."""
    jacobians = []
    for row in x:
        with tf.GradientTape(persistent=True) as tape:
            watched = tf.constant(row[np.newaxis])
            tape.watch(watched)
            output = function(model(watched, training=False))
            entries = tf.unstack(tf.reshape(output, [-1]))
        gradients = [tape.gradient(entry, watched)[0] for entry in entries]
        jacobians.append(np.reshape(gradients, (*output.shape[1:], *row.shape)))
    return np.stack(jacobians)


def check(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# "auto" is one of the others, and which is up to the numbers of inputs and outputs.
CASES = [
    *itertools.product(MODELS, ["forward"]),
    # Backwards through any model is TensorFlow's own way: what takes longest to trace is left out.
    *(pytest.param(name, "reverse", marks=[pytest.mark.long] * (name == "attention")) for name in MODELS),
    *(pytest.param(name, "auto", marks=[] if name.startswith("few") else pytest.mark.long) for name in MODELS),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_equals_a_tape_around_each_row(name, mode):
    model = MODELS[name]()
    x = rows(model, 4)
    check(input_jacobian(model, x, mode, batch_size=3), reference(model, x))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["few inputs", "convolution", "attention"])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_under_xla(name, mode):
    model = MODELS[name]()
    # No part of a batch is left, as XLA would compile once more for it.
    x = rows(model, 4)
    check(input_jacobian(model, x, mode, batch_size=2, jit_compile=True), reference(model, x))


@given(
    st.integers(1, 9),
    st.integers(1, 11),
    st.integers(1, 13),
    st.integers(1, 8),
    st.sampled_from(["auto", "forward", "reverse"]),
)
# More seeds than passes that are made side by side.
@example(2, 11, 3, 2, "reverse")
@example(9, 2, 3, 2, "forward")
def test_any_sizes(inputs, outputs, count, batch_size, mode):
    model = dense(inputs, outputs)
    x = rows(model, count)
    check(input_jacobian(model, x, mode, batch_size=batch_size), reference(model, x))


def test_of_a_function_of_the_outputs():
    model = dense(3, 6)
    x = rows(model, 5)
    for function in (lambda y: tf.reshape(y, [-1, 2, 3]) ** 2, lambda y: tf.nn.softmax(y)[:, 1]):
        check(input_jacobian(model, x, output=function), reference(model, x, function))


def test_of_one_entry_it_is_the_gradient():
    model = dense(3, 6)
    x = rows(model, 5)
    check(input_jacobian(model, x, output=4), input_gradients(model, x, 4))
    check(input_jacobian(model, x, output=-2), input_gradients(model, x, 4))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(mode, policy):
    full = dense(4, 5)
    keras.config.set_dtype_policy(policy)
    try:
        half = dense(4, 5)
    finally:
        keras.config.set_dtype_policy("float32")
    half.set_weights(full.get_weights())
    x = rows(full, 6)
    check(input_jacobian(half, x, mode), reference(full, x), tolerance=0.03)


def bilinear():
    """Its gradient has no derivative in TensorFlow, which takes it for a constant."""
    x = keras.Input((3, 3, 1))
    wide = layers.UpSampling2D(2, interpolation="bilinear")(layers.Conv2D(1, 1, activation="tanh")(x))
    return keras.Model(x, layers.Concatenate()([layers.Flatten()(wide), layers.Flatten()(x)]))


def softsign():
    return keras.Sequential([keras.Input((2,)), layers.Dense(9), layers.Lambda(tf.nn.softsign)])


def recurrent_softsign():
    return keras.Sequential([keras.Input((3, 2)), layers.SimpleRNN(9, "softsign")])


def recurrent_gates():
    return keras.Sequential(
        [keras.Input((3, 1)), layers.Bidirectional(layers.LSTM(4, recurrent_activation="softsign"))]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("build", [bilinear, softsign, recurrent_softsign, recurrent_gates])
def test_where_forward_mode_cannot_be_had(build):
    model = build()
    x = rows(model, 5)
    check(input_jacobian(model, x, batch_size=2), reference(model, x))
    for jit_compile in (False, True):
        with pytest.raises(ValueError, match="mode='reverse'"):
            input_jacobian(model, x, "forward", jit_compile=jit_compile)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="must be 'auto', 'forward' or 'reverse'"):
        input_jacobian(dense(2, 3), np.ones((2, 2)), "backward")
