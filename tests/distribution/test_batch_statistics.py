"""Synchronized batch normalization takes the statistics of one device: of all examples, and of nothing else."""

import contextlib

import keras
import numpy as np
import pytest

from keras_paragrad import DistributedFit

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(17, 6, 4)).astype("float32"), DRAW.normal(size=(17, 1)).astype("float32")
X[::3, 3:] = X[1::3, 1:] = 0


def unmasked():
    inputs = keras.Input((6, 4))
    normalized = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(5)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(keras.ops.tanh(normalized))))


def masked():
    inputs = keras.Input((6, 4))
    normalized = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Masking()(inputs))
    pooled = keras.layers.GlobalAveragePooling1D()(normalized)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(5, activation="tanh")(pooled)))


def trained(make, rows, dist=None):
    """The weights before and after two epochs."""
    keras.utils.set_random_seed(1)
    with dist.scope() if dist else contextlib.nullcontext():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before = model.get_weights()
    data = {"x": X[:rows], "y": Y[:rows], "batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    dist.fit(model, **data) if dist else model.fit(**data)
    return before, model.get_weights()


@pytest.mark.few(0, "17-unmasked", "16-masked")
@pytest.mark.parametrize("make", [unmasked, masked])
# With 17 rows the last batch has one, and the second replica none.
@pytest.mark.parametrize("rows", [16, 17])
def test_statistics_are_those_of_one_device(make, rows):
    before, expected = trained(make, rows)
    _, weights = trained(make, rows, DistributedFit("mirrored"))
    moved = max(np.abs(one - other).max() for one, other in zip(expected, before, strict=True))
    for one, other in zip(expected, weights, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * moved)
