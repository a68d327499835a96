"""Losses that layers add: what Keras sums is a sum."""

import keras
import numpy as np
import pytest
from drawn_layers import some_inputs
from keras import layers, ops
from oracles import example_gradients, norms_of

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
    wrapped = wrap(make_model(values), loss_reduction="sum_over_batch_size")
    wrapped.compile("sgd")
    with pytest.raises(ValueError, match="Write loss_reduction='sum'"):
        wrapped.fit(X, Y, verbose=0)


def trained(reduce, weighting=None, size=None, steps=None, compiled="sum"):
    model = make_model(reduce)
    optimizer = keras.optimizers.SGD(0.01)
    callbacks = []
    if steps:
        optimizer = AccumulatingOptimizer(optimizer, steps=steps, weighting=weighting)
        callbacks = [ExactAccumulation()]
    # Tracing takes longer than a few small steps.
    whole = not (size or steps)
    model.compile(optimizer, compiled and keras.losses.MeanSquaredError(compiled), run_eagerly=whole)
    if size:
        microbatch(model, size, weighting=weighting)
    batch_size = 10 // steps if steps else 10
    model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("arguments", [{"size": 4}, {"steps": 2}], ids=["slices", "windows"])
@pytest.mark.parametrize("weighting", ["auto", "sum"])
@pytest.mark.parametrize("compiled", ["sum", None])
def test_parts_of_a_batch_that_is_summed(arguments, weighting, compiled):
    theirs = trained(values, compiled=compiled)
    ours = trained(values, weighting, compiled=compiled, **arguments)
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_a_scalar_that_is_a_sum_can_be_said_to_be():
    theirs = trained(ops.sum)
    with pytest.raises(ValueError, match="'mask' or 'sum'"):
        trained(ops.sum, "auto", size=4)
    ours = trained(ops.sum, "sum", size=4)
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("weighting", "says"), [("auto", "add_loss.keras.ops.mean.values.."), ("sum", "mean_squared_error averages")]
)
def test_a_sum_beside_a_mean_in_parts_is_refused(weighting, says):
    with pytest.raises(ValueError, match=says):
        trained(values, weighting, size=4, compiled="sum_over_batch_size")


def shown(size=None, weighting="auto", compiled="sum", reduce=values):
    model = (
        make_model(reduce)
        if reduce
        else keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_initializer="ones")])
    )
    model.compile(
        keras.optimizers.SGD(0.01), compiled and keras.losses.MeanSquaredError(compiled), run_eagerly=not size
    )
    if size:
        microbatch(model, size, weighting=weighting)
    history = model.fit(X, Y, batch_size=6, epochs=2, validation_data=(X, Y), shuffle=False, verbose=0).history
    return np.array([history["loss"], history["val_loss"]])


@pytest.mark.parametrize(
    ("weighting", "compiled", "reduce"),
    [
        ("auto", "sum", values),
        ("auto", None, values),
        ("sum", "none", None),
        ("sum", "sum", values),
        ("sum", "sum", ops.sum),
    ],
)
def test_history_shows_the_sums_of_whole_batches(weighting, compiled, reduce):
    theirs = shown(compiled=compiled, reduce=reduce)
    np.testing.assert_allclose(shown(4, weighting, compiled, reduce), theirs, rtol=1e-6)
