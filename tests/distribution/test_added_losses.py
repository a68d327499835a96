"""Losses that layers add, on replicas that wait for each other between two layers."""

import contextlib
import copy

import keras
import numpy as np
import pytest

from keras_paragrad import DistributedFit

L = keras.layers
X = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
# What has the replicas traced in turns: statistics are all-reduced, or weights are gathered.
MIDDLES = {"statistics": lambda: L.BatchNormalization(synchronized=True), "weights": lambda: L.Dense(32)}
SHARD = {"statistics": None, "weights": "parameters"}


@pytest.mark.few(1)
@pytest.mark.own_process
@pytest.mark.parametrize("middle", MIDDLES)
def test_each_replica_has_its_own(middle):
    found = []
    # Of the first layer, whose weights are not cut, nothing is gathered before it adds its loss.
    options = {"jit": False, "weighting": "examples", "shard": SHARD[middle], "min_shard_bytes": 600}
    for dist in (None, DistributedFit("mirrored", ["CPU:0", "CPU:1"], **options)):
        keras.utils.set_random_seed(1)
        with dist.scope() if dist else contextlib.nullcontext():
            first = L.Dense(8, activity_regularizer="l2")
            model = keras.Sequential([keras.Input((8,)), first, MIDDLES[middle](), L.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        before = first._losses
        prepared = dist.prepare(model) if dist else None
        history = model.fit(X, X[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found.append((model.get_weights(), history["loss"], model.evaluate(X, X[:, :1], batch_size=8, verbose=0)))
        if prepared:
            assert type(copy.deepcopy(first._losses)) is list
            prepared.undo()
            assert first._losses is before
    (weights, *shown), (expected, *expected_shown) = reversed(found)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.hstack(shown), np.hstack(expected_shown), rtol=1e-6)
