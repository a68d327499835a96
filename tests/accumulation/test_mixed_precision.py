"""Loss scaling and what is not finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

generator = np.random.default_rng(0)
X, Y = (generator.normal(size=(16, width)).astype("float32") for width in (5, 2))


def model_of(optimizer, policy="mixed_float16", **mode):
    keras.utils.set_random_seed(2)
    hidden = keras.layers.Dense(4, activation="tanh", dtype=policy)
    # The policy of the model is what Keras goes by when it wraps the optimizer.
    model = keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(2, dtype=policy)])
    model.dtype_policy = keras.dtype_policies.get(policy)
    model.compile(optimizer, "mse", **mode)
    return model


def whole_of(optimizer, policy="mixed_float16"):
    """The model that is trained on whole batches."""
    # Tracing takes longer than a few small steps.
    return model_of(optimizer, policy, run_eagerly=True)


def fit(model, x=X, batch_size=4, epochs=1, callbacks=(), y=Y):
    model.fit(x, y, batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"jit_compile": True}])
@pytest.mark.parametrize("callbacks", [[], [ExactAccumulation]], ids=["alone", "exact"])
def test_under_automatic_loss_scaling(mode, callbacks):
    inner = lambda: keras.optimizers.Adam(0.01, clipnorm=0.05)  # noqa: E731
    parts = model_of(AccumulatingOptimizer(inner(), 4, weighting="auto" if callbacks else "uniform"), **mode)
    assert isinstance(parts.optimizer, keras.optimizers.LossScaleOptimizer)
    fit(parts, epochs=3, callbacks=[make() for make in callbacks])
    assert parts.optimizer.iterations.numpy() == 3
    whole = fit(whole_of(inner()), batch_size=16, epochs=3)
    # Half precision rounds the two batches' products differently; Adam passes on a part of that in each of its steps.
    assert largest_difference(parts, whole) < 2e-3


def test_bfloat16_needs_no_scaling():
    parts = model_of(AccumulatingOptimizer("sgd", 4), "mixed_bfloat16", run_eagerly=True)
    fit(parts, callbacks=[ExactAccumulation()])
    whole = fit(whole_of("sgd", "mixed_bfloat16"), batch_size=16)
    assert largest_difference(parts, whole) < 1e-3


def spoiled(rows):
    x = X.copy()
    x[rows] = np.nan
    return x


def without(rows):
    kept = np.setdiff1d(np.arange(16), rows)
    return X[kept], Y[kept]


@pytest.mark.parametrize("mode", [{}, pytest.param({"jit_compile": True}, marks=pytest.mark.long)])
def test_a_spoiled_micro_batch_counts_for_nothing_and_halves_the_scale(mode):
    parts = model_of(AccumulatingOptimizer("sgd", 4), **mode)
    fit(parts, spoiled([4]), callbacks=[ExactAccumulation()])
    assert float(parts.optimizer.dynamic_scale) == 2.0**14
    assert parts.optimizer.iterations.numpy() == 1
    kept_x, kept_y = without([4, 5, 6, 7])
    whole = fit(whole_of("sgd"), kept_x, 12, y=kept_y)
    assert largest_difference(parts, whole) < 1e-3


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("callbacks", [[ExactAccumulation], pytest.param([], marks=pytest.mark.long)])
def test_a_spoiled_micro_batch_on_any_replica_never_reaches_the_weights(mirrored, callbacks):
    with mirrored.scope():
        weighting = "auto" if callbacks else "uniform"
        parts = model_of(AccumulatingOptimizer(keras.optimizers.Adam(0.01), 2, weighting=weighting))
    # On the first replica, and then on the second.
    for updates, rows in ((3, [4, 5]), (6, [6, 7])):
        fit(parts, spoiled(rows), epochs=2, callbacks=[make() for make in callbacks])
        assert parts.optimizer.iterations.numpy() >= updates
        assert all(np.isfinite(weight).all() for weight in parts.get_weights())


@pytest.mark.long
@pytest.mark.own_process
def test_on_two_replicas(mirrored):
    with mirrored.scope():
        # Tracing takes longer than four steps; the test above has a graph.
        parts = model_of(AccumulatingOptimizer(keras.optimizers.SGD(0.1, clipnorm=0.05), 2), run_eagerly=True)
    fit(parts, batch_size=8, epochs=2, callbacks=[ExactAccumulation()])
    whole = fit(whole_of(keras.optimizers.SGD(0.1, clipnorm=0.05)), batch_size=16, epochs=2)
    assert largest_difference(parts, whole) < 1e-3


@pytest.mark.parametrize(
    "mode", [pytest.param({}, marks=pytest.mark.long), {"jit_compile": True}, {"run_eagerly": True}]
)
def test_skip_nonfinite(mode):
    inner = lambda: keras.optimizers.AdamW(0.01)  # noqa: E731
    parts = model_of(AccumulatingOptimizer(inner(), 4, skip_nonfinite=True), "float32", **mode)
    fit(parts, spoiled([5]), callbacks=[ExactAccumulation()])
    kept_x, kept_y = without([4, 5, 6, 7])
    whole = fit(whole_of(inner(), "float32"), kept_x, 12, y=kept_y)
    assert largest_difference(parts, whole) < 1e-6
    before = parts.get_weights()
    fit(parts, spoiled(range(16)), callbacks=[ExactAccumulation()])
    assert parts.optimizer.iterations.numpy() == 1
    assert all(np.array_equal(a, b) for a, b in zip(before, parts.get_weights(), strict=True))


def test_without_skipping_the_weights_take_it_as_in_keras():
    parts = model_of(AccumulatingOptimizer("sgd", 4), "float32", run_eagerly=True)
    fit(parts, spoiled([5]), callbacks=[ExactAccumulation()])
    assert not np.isfinite(parts.get_weights()[0]).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3), (None, 1e-6)]
)
def test_accumulator_dtypes(dtype, tolerance):
    # One is traced.
    mode = {"run_eagerly": dtype != "bfloat16"}
    parts = model_of(AccumulatingOptimizer(keras.optimizers.SGD(0.1), 4, accumulator_dtype=dtype), "float32", **mode)
    fit(parts, epochs=2, callbacks=[ExactAccumulation()])
    expected = dtype or "float32"
    assert {variable.dtype for variable in parts.optimizer.window.accumulators} == {expected}
    whole = fit(whole_of(keras.optimizers.SGD(0.1), "float32"), batch_size=16, epochs=2)
    assert largest_difference(parts, whole) < tolerance


def test_float8_scales_take_the_largest_of_the_window():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
    model.layers[0].quantize("float8")
    model.compile(AccumulatingOptimizer(keras.optimizers.SGD(0.01), 2), "mse")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    scales = [v for v in model.trainable_variables if getattr(v, "overwrite_with_gradient", False)]
    assert scales
    gradients = [[tf.fill(v.shape, value) for v in model.trainable_variables] for value in (3.0, 2.0)]
    kernel = model.trainable_variables[0].numpy()
    optimizer.apply(gradients[0])
    assert all(np.all(v.numpy() != 3.0) for v in scales)
    optimizer.apply(gradients[1])
    assert all(np.all(v.numpy() == 3.0) for v in scales)
    np.testing.assert_allclose(model.trainable_variables[0].numpy(), kernel - 0.01 * 2.5, atol=1e-6)
