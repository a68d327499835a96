"""Hessian-vector products against whole Hessians, and the axioms of integrated gradients."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_paragrad.inputs.attribution import integrated_gradients
from keras_paragrad.inputs.gradients import hessian_vector_product
from keras_paragrad.inputs.jacobian import input_jacobian

layers = keras.layers


def build(activation="tanh"):
    return keras.Sequential([keras.Input((4,)), layers.Dense(6, activation), layers.Dense(2)])


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def hessians(model, x, index):
    """A second tape around the gradient of each row."""
    found = []
    for row in x:
        watched = tf.constant(row[np.newaxis])
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(watched)
            with tf.GradientTape() as inner:
                inner.watch(watched)
                value = model(watched, training=False)[:, index]
            entries = tf.unstack(inner.gradient(value, watched)[0])
        found.append([outer.gradient(entry, watched)[0] for entry in entries])
    return np.array(found)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 1), st.booleans())
def test_is_the_hessian_times_the_vector(count, batch_size, index, jit_compile):
    model, x, vector = build(), normal(0, count, 4), normal(1, count, 4)
    expected = np.einsum("rij,rj->ri", hessians(model, x, index), vector)
    found = hessian_vector_product(model, x, vector, index, batch_size=batch_size, jit_compile=jit_compile)
    assert np.abs(found - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max())


def test_of_nested_inputs():
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    model = keras.Model({"a": a, "b": b}, a * a * b)
    x, vector = ({"a": normal(seed, 5, 1), "b": normal(seed + 1, 5, 1)} for seed in (0, 2))
    found = hessian_vector_product(model, x, vector, batch_size=2)
    np.testing.assert_allclose(found["a"], 2 * x["b"] * vector["a"] + 2 * x["a"] * vector["b"], atol=1e-5)
    np.testing.assert_allclose(found["b"], 2 * x["a"] * vector["a"], atol=1e-5)
    of_b = hessian_vector_product(model, x, vector["b"], wrt="b")
    np.testing.assert_array_equal(of_b, 0)


def test_vectors_that_do_not_fit_are_refused():
    for vector in (normal(0, 5, 3), [normal(0, 5, 4), normal(0, 5, 4)]):
        with pytest.raises(ValueError, match="`vector` has shape"):
            hessian_vector_product(build(), normal(0, 5, 4), vector, 0)
    with pytest.raises(ValueError, match="Pass arrays for both"):
        hessian_vector_product(build(), iter([normal(0, 5, 4)]), normal(0, 5, 4), 0)


def test_a_second_derivative_that_tensorflow_would_leave_out_is_refused():
    model = keras.Sequential([keras.Input((3, 3, 1)), layers.UpSampling2D(interpolation="bilinear"), layers.Flatten()])
    x = normal(0, 2, 3, 3, 1)
    with pytest.raises(ValueError, match="ResizeBilinearGrad"):
        hessian_vector_product(model, x, x, lambda y: tf.reduce_sum(tf.tanh(y), axis=-1))

    # TensorFlow 2.22 has softsign's.
    def normalized(y):
        return tf.nn.local_response_normalization(y[:, tf.newaxis, tf.newaxis])[:, 0, 0]

    with pytest.raises(ValueError, match="no second derivative"):
        hessian_vector_product(build("linear"), normal(0, 2, 4), normal(0, 2, 4), lambda y: normalized(y)[:, 0])
    recurrent = keras.Sequential([keras.Input((3, 2)), keras.layers.GRU(1, normalized)])
    with pytest.raises(ValueError, match="no second derivative"):
        hessian_vector_product(recurrent, normal(0, 2, 3, 2), normal(0, 2, 3, 2))


@given(st.integers(1, 9), st.sampled_from(["tanh", "silu"]), st.booleans(), st.booleans(), st.integers(0, 3))
def test_attributions_add_up_to_the_difference(count, activation, from_zero, jit_compile, seed):
    model, x = build(activation), normal(seed, count, 4)
    baseline = None if from_zero else normal(seed + 1, 4)
    start = np.zeros(4, "float32") if baseline is None else baseline
    found = integrated_gradients(model, x, baseline, output=1, batch_size=4, jit_compile=jit_compile)
    difference = model(x)[:, 1] - model(np.tile(start, (count, 1)))[:, 1]
    np.testing.assert_allclose(found.sum(axis=1), difference, atol=5e-6)


def test_a_linear_model_is_attributed_exactly():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    x = normal(0, 6, 4)
    for baseline in (0.5, np.full(4, 0.5)):
        found = integrated_gradients(model, x, baseline, steps=3)
        np.testing.assert_allclose(found, (x - 0.5) * model.get_weights()[0][:, 0], atol=1e-6)


def test_an_input_that_does_not_matter_gets_nothing():
    model = build()
    kernel, *others = model.get_weights()
    kernel[2] = 0
    model.set_weights([kernel, *others])
    assert np.all(integrated_gradients(model, normal(0, 5, 4), output=0)[:, 2] == 0)
    assert np.all(input_jacobian(model, normal(0, 5, 4))[:, :, 2] == 0)


@pytest.mark.parametrize(("argument", "says"), [({"steps": 0}, "`steps` is 0"), ({"baseline": np.ones(3)}, "baseline")])
def test_arguments_are_checked(argument, says):
    with pytest.raises(ValueError, match=says):
        integrated_gradients(build(), normal(0, 5, 4), output=0, **argument)
