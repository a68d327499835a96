"""Losses that layers add: what Keras sums is a sum."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import some_inputs

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch, wrap


class Adds(layers.Layer):
    """Adds a loss: one value for each example, or their mean or sum."""

    def __init__(self, reduce, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(self.reduce(ops.square(inputs)))
        return inputs


def values(squares):
    return ops.sum(squares, axis=-1)


def each_value(squares):
    return squares


def make_model(reduce):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(2), Adds(reduce)])


X, Y = some_inputs((10, 3)), np.ones((10, 2), "float32")


@pytest.mark.covering
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("compiled", ["sum", None])
@pytest.mark.parametrize("reduce", [values, each_value])
def test_one_value_for_each_example_is_summed(reduce, compiled, jit_compile):
    model = make_model(reduce)
    wrapped = wrap(model)
    loss = compiled and keras.losses.MeanSquaredError(compiled)
    wrapped.compile(keras.optimizers.SGD(0.0), loss, jit_compile=jit_compile)
    wrapped.fit(X, Y, batch_size=5, shuffle=False, verbose=0)

    def own(y_pred, y):
        return ops.sum(ops.square(y_pred)) + (ops.mean(ops.square(y_pred - y)) if compiled else 0)

    theirs = norms_of(example_gradients(model, X, own, Y))[5:]
    np.testing.assert_allclose(wrapped.per_example.norms, theirs, rtol=0, atol=1e-6 * theirs.max())


@pytest.mark.parametrize("compiled", ["mse", None])
def test_a_mean_is_a_mean(compiled):
    model = make_model(lambda squares: ops.mean(values(squares)))
    wrapped = wrap(model)
    wrapped.compile(keras.optimizers.SGD(0.0), compiled)
    wrapped.fit(X, Y, batch_size=5, shuffle=False, verbose=0)

    def own(y_pred, y):
        return ops.sum(ops.square(y_pred)) + (ops.mean(ops.square(y_pred - y)) if compiled else 0)

    theirs = norms_of(example_gradients(model, X, own, Y))[5:]
    np.testing.assert_allclose(wrapped.per_example.norms, theirs, rtol=0, atol=1e-6 * theirs.max())


def test_a_sum_beside_a_mean_is_refused():
    wrapped = wrap(make_model(values))
    wrapped.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"add_loss\(keras.ops.mean\(values\)\)"):
        wrapped.fit(X, Y, verbose=0)


def trained(reduce, weighting=None, size=None, steps=None, compiled="sum", batch_size=10):
    """The weights after training, and what `fit` has shown."""
    if reduce:
        model = make_model(reduce)
    else:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.01)
    callbacks = []
    if steps:
        optimizer = AccumulatingOptimizer(optimizer, steps=steps, weighting=weighting)
        callbacks = [ExactAccumulation()]
    # Tracing takes longer than a few small steps.
    whole = not (size or steps)
    loss = compiled and keras.losses.MeanSquaredError(compiled)
    model.compile(optimizer, loss, run_eagerly=whole)
    if size:
        microbatch(model, size, weighting=weighting)
    data = {"x": X, "y": Y, "batch_size": batch_size // (steps or 1), "validation_data": (X, Y)}
    history = model.fit(**data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    return model.get_weights(), np.array([history["loss"], history["val_loss"]])


def check_parts(reduce, weighting, compiled="sum", **arguments):
    """Parts train as whole batches do, and slices show the same, also where the last batch is smaller."""
    batch_size = 6 if "size" in arguments else 10
    (weights, shown), (expected, whole) = (
        trained(reduce, compiled=compiled, batch_size=batch_size, **more)
        for more in ({"weighting": weighting, **arguments}, {})
    )
    assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) < 1e-6
    if "size" in arguments:
        np.testing.assert_allclose(shown, whole, rtol=1e-6)


SLICES, WINDOWS = {"size": 4}, {"steps": 2}


# All pairs; the other half is long.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "weighting", "compiled"),
    [
        (SLICES, "auto", "sum"),
        (SLICES, "sum", None),
        (WINDOWS, "auto", None),
        (WINDOWS, "sum", "sum"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (SLICES, "auto", None),
                (SLICES, "sum", "sum"),
                (WINDOWS, "auto", "sum"),
                (WINDOWS, "sum", None),
            )
        ),
    ],
    ids=str,
)
def test_parts_of_a_batch_that_is_summed(arguments, weighting, compiled):
    check_parts(values, weighting, compiled, **arguments)


def test_slices_without_an_added_loss():
    check_parts(None, "sum", "none", **SLICES)


@pytest.mark.long
def test_a_scalar_that_is_a_sum_can_be_said_to_be():
    with pytest.raises(ValueError, match="'mask' or 'sum'"):
        trained(ops.sum, "auto", size=4)
    check_parts(ops.sum, "sum", **SLICES)


@pytest.mark.parametrize(
    ("weighting", "says"), [("auto", "add_loss.keras.ops.mean.values.."), ("sum", "mean_squared_error averages")]
)
def test_a_sum_beside_a_mean_in_parts_is_refused(weighting, says):
    with pytest.raises(ValueError, match=says):
        trained(values, weighting, steps=2, compiled="sum_over_batch_size")
