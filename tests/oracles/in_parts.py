"""Trains a model in parts of batches, in each way that there is, and compares it with one device's whole batches."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch

# Of the largest weight, after updates with a learning rate of about 1.
TOLERANCE = 1e-6
# Of a batch, of a slice, and the micro-batches of a window.
ROWS, SIZE, STEPS = 24, 5, 3
# What is logged once if parts of the loss aren't computed.
WHOLE = "is computed on whole batches"
# The second batch has fewer rows.
X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
Y = np.tanh(X[:, :2] + X[:, 2:4])
# From the options of `compile` to a compiled model.
Make = Callable[..., keras.Model]


def model_of(*more: Callable[[], Any], loss: Any = "mse", optimizer: Any = None, **compiled: Any) -> keras.Model:
    """Has what `more` make as hidden layers."""
    keras.utils.set_random_seed(0)
    x = y = keras.Input((6,))
    for make in (lambda: layers.Dense(3, "tanh"), *more, lambda: layers.Dense(2)):
        y = make()(y)
    model = keras.Model(x, y)
    model.compile(optimizer or keras.optimizers.SGD(0.5), loss, **{"jit_compile": False, **compiled})
    return model


def values(variables: Any) -> list[np.ndarray]:
    return [ops.convert_to_numpy(each) for each in variables]


def trained(model: Any, fit: Any = None, size: int = ROWS, x: Any = X, y: Any = Y, **options: Any) -> Any:
    (fit or model.fit)(x, y, batch_size=size, shuffle=False, verbose=0, **options)
    return model


def whole(make: Make, **options: Any) -> Any:
    return trained(make(run_eagerly=True), **options)


def in_slices(make: Make, weighting: Any = "auto", prove: bool = True, deterministic: int = 0, **options: Any) -> Any:
    model = make(run_eagerly=not deterministic)
    with microbatch(model, SIZE, weighting=weighting, prove=prove, deterministic=deterministic or False):
        return trained(model, **options)


def on_replicas(make: Make, weighting: Any = "auto", **options: Any) -> Any:
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], weighting=weighting)
    with dist.scope():
        model = make()
    return trained(model, functools.partial(dist.fit, model), **options)


def for_windows(make: Make, weighting: Any = "auto") -> Any:
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.5), STEPS, weighting=weighting)
    return make(optimizer=optimizer, run_eagerly=True)


def in_windows(make: Make, weighting: Any = "auto", prove: bool = True, callbacks: Any = (), **options: Any) -> Any:
    callbacks = [*callbacks, ExactAccumulation(prove=prove)]
    return trained(for_windows(make, weighting), size=ROWS // STEPS, callbacks=callbacks, **options)


def refusal_in_windows(make: Make, weighting: Any = "auto", **options: Any) -> str:
    """What the error says, before which no weight has changed."""
    model = for_windows(make, weighting)
    before = values(model.trainable_variables)
    with pytest.raises(ValueError) as refusal:
        trained(model, size=ROWS // STEPS, callbacks=[ExactAccumulation()], **options)
    assert not int(model.optimizer.iterations)
    np.testing.assert_equal(values(model.trainable_variables[: len(before)]), before)
    return str(refusal.value)


def check(train: Any, make: Make, *, how: Any = None, **data: Any) -> None:
    """Compares weights, states and logs with those of one device that computes whole batches."""
    ours, expected = train(make, **(how or {}), **data), whole(make, **data)
    assert largest_difference(ours, expected) < TOLERANCE
    for name, shown in expected.history.history.items():
        np.testing.assert_allclose(ours.history.history[name], shown, rtol=1e-5, atol=1e-6, err_msg=name)
