"""The size of a chunk is chosen by the memory of a row, and what is given wins."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import hessian_vector_product, input_gradients, input_jacobian
from keras_paragrad.inputs import run
from keras_paragrad.memory.cost import bytes_of_results

layers = keras.layers


def dense():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def bytes_of(model, rows=1):
    traced = tf.function(lambda x: model(x, training=False), autograph=False).get_concrete_function(
        tf.TensorSpec((rows, *model.input_shape[1:]), "float32")
    )
    return bytes_of_results(traced.graph)


def test_what_is_computed_is_counted_and_grows_with_the_rows():
    # A product, a sum with the bias and a tanh of 4 numbers; a product and a sum of 2.
    assert bytes_of(dense()) == 4 * (3 * 4 + 2 * 2)
    assert bytes_of(dense(), rows=5) == 5 * bytes_of(dense())


def test_steps_of_recurrent_layers_are_counted():
    short, long = (bytes_of(keras.Sequential([keras.Input((n, 4)), layers.LSTM(24)])) for n in (10, 100))
    assert 8 < long / short < 12


@pytest.mark.parametrize("derivative", [input_gradients, input_jacobian, hessian_vector_product])
def test_large_rows_come_in_small_chunks(derivative, monkeypatch):
    monkeypatch.setattr(run, "BUDGET", 1500)
    model, x = dense(), np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    rest = {"vector": x} if derivative is hessian_vector_product else {}
    if derivative is not input_jacobian:
        rest["output"] = np.arange(40) % 2
    parts = list(derivative(model, x, stream=True, **rest))
    assert 1 <= len(parts[0]) < 40
    whole = derivative(model, x, batch_size=40, **rest)
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    assert len(next(derivative(model, x, stream=True, batch_size=33, **rest))) == 33
