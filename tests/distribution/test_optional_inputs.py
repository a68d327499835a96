"""Optional inputs that are left out, on two replicas."""

import keras
import numpy as np
import pytest
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit


class Plus(keras.layers.Layer):
    def call(self, x, other=None):
        return x if other is None else x + other

    def compute_output_shape(self, x_shape, other_shape=None):
        return x_shape


def adding():
    keras.utils.set_random_seed(0)
    x, other = keras.Input((2,), name="x"), keras.Input((2,), name="other", optional=True)
    model = keras.Model({"x": x, "other": other}, keras.layers.Dense(2)(Plus()(x, other)))
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], jit_compile=False)
    return model


@pytest.mark.long
@pytest.mark.own_process
def test_an_input_that_is_left_out(mirrored):
    x = {"x": np.arange(10, dtype="float32").reshape(5, 2), "other": None}
    y = np.ones((5, 2), "float32")
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    plain = adding()
    expected = plain.fit(x, y, **options).history
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        ours = adding()
    history = dist.fit(ours, x, y, **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    assert largest_difference(ours, plain) < 1e-6
    evaluated = ours.evaluate(dist.dataset(x, y, batch_size=4), verbose=0)
    np.testing.assert_allclose(evaluated, plain.evaluate(x, y, batch_size=4, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5)


@pytest.mark.own_process
def test_an_input_that_must_be_there(mirrored):
    dist = DistributedFit(strategy=mirrored)
    with dist.scope():
        x = keras.Input((3,))
        model = keras.Model(x, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
    dist.prepare(model)
    with pytest.raises(ValueError, match="not optional"):
        model.fit([None], np.ones((4, 1)), verbose=0)
