"""Examples that are not finite add nothing to a clipped update and touch no other; masks of others do."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.every_example import computing
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import randomize, some_inputs
from sample_models.one_of_each import RULES

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, ExampleGradients, microbatch, wrap
from keras_paragrad import per_example_norms as norms_of_data

ROWS, BAD = 6, [1, 4]


def spoilt(x, value):
    x = x.copy()
    x.reshape(len(x), -1)[BAD, 1] = value
    return x


@pytest.mark.covering
@pytest.mark.parametrize(
    ("jit_compile", "value"), [(False, np.nan), (True, np.nan), pytest.param(False, np.inf, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", RULES)
def test_inputs_that_are_not_finite(name, jit_compile, value):
    shape, make = RULES[name]
    model = keras.Sequential([keras.Input(shape), make()])
    randomize(model)
    x = some_inputs((ROWS, *shape))
    targets = some_inputs(tuple(model(x).shape)) + 1
    weights = np.ones(ROWS, "float32")
    weights[BAD] = 0
    seed = [variable.numpy() for variable in model.non_trainable_variables]
    found, quantities = [], computing(model, weights, jit_compile, run_eagerly=not jit_compile)
    for inputs in (x, spoilt(x, value)):
        for variable, before in zip(model.non_trainable_variables, seed, strict=True):
            variable.assign(before)
        found.append(quantities(tf.constant(inputs), targets))
    (gradients, squares, _, sums, _), (spoilt_gradients, spoilt_squares, _, spoilt_sums, _) = found
    good = np.setdiff1d(np.arange(ROWS), BAD)
    scale = np.sqrt(np.max(squares))
    assert not np.isfinite(spoilt_squares.numpy()[BAD]).any() or name in ("recurrent", "prelu")
    assert np.abs(np.sqrt(spoilt_squares) - np.sqrt(squares))[good].max() < 1e-6 * scale
    for ours, theirs in zip(spoilt_gradients, gradients, strict=True):
        np.testing.assert_allclose(ours.numpy()[good], theirs.numpy()[good], rtol=0, atol=1e-6 * scale)
    for ours, theirs in zip(spoilt_sums, sums, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * scale * ROWS)


@pytest.mark.few(2)
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", [layers.Embedding, layers.ReversibleEmbedding])
def test_cotangents_that_are_not_finite(kind, jit_compile):
    model = keras.Sequential([keras.Input((4,), dtype="int32"), kind(9, 3)])
    if kind is layers.ReversibleEmbedding:
        words, table = keras.Input((4,), dtype="int32"), kind(9, 3)
        model = keras.Model(words, table(ops.tanh(table(words)), reverse=True))
    randomize(model)
    x = np.random.default_rng(0).integers(0, 9, (ROWS, 4)).astype("int32")
    targets = some_inputs((ROWS, *model.output_shape[1:]))
    weights = np.ones(ROWS, "float32")
    weights[BAD] = 0
    quantities = computing(model, weights, jit_compile, run_eagerly=not jit_compile)
    plain, bad = (quantities(tf.constant(x), each) for each in (targets, spoilt(targets, np.nan)))
    assert np.isnan(bad[1].numpy()[BAD]).all()
    for ours, theirs in zip(bad[3], plain[3], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def make_model(recurrent=False):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6, 2)),
            layers.Conv1D(4, 3, activation="tanh"),
            layers.LayerNormalization(),
            # The loops of recurrent layers take longest to trace.
            layers.LSTM(3) if recurrent else layers.Flatten(),
            layers.Dense(2),
        ]
    )


X, Y = some_inputs((ROWS, 6, 2)), some_inputs((ROWS, 2))


def own_loss(y_pred, y):
    return ops.mean(ops.square(y_pred - y))


PLAIN, COMPILED, EAGER = {"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}
SPOILT = [
    (PLAIN, "targets", np.inf),
    (PLAIN, "weights", np.nan),
    (COMPILED, "inputs", np.inf),
    (EAGER, "inputs", np.nan),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in ((PLAIN, "inputs", np.nan), (PLAIN, "inputs", np.inf), (COMPILED, "targets", np.nan))
    ),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("execution", "where", "value"), SPOILT, ids=str)
def test_a_clipped_update_leaves_them_out(execution, where, value):
    x = spoilt(X, value) if where == "inputs" else X
    y = spoilt(Y, value) if where == "targets" else Y
    weight = np.ones(ROWS, "float32")
    weight[BAD] = value if where == "weights" else 1
    model, expected = make_model(where == "targets"), make_model(where == "targets")
    wrapped = wrap(model, clip_norm=0.1)
    wrapped.compile(keras.optimizers.SGD(1.0), "mse", **execution)
    wrapped.fit(x, y, sample_weight=weight, verbose=0, shuffle=False)

    good = np.setdiff1d(np.arange(ROWS), BAD)
    gradients = example_gradients(expected, X[good], own_loss, Y[good])
    norms = norms_of(gradients)
    for variable, gradient in zip(expected.trainable_variables, gradients, strict=True):
        update = np.tensordot(np.minimum(1, 0.1 / norms), gradient, 1) / ROWS
        variable.assign_sub(update)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    layer = wrapped.per_example
    assert not np.isfinite(layer.norms[BAD]).any()
    np.testing.assert_allclose(layer.norms[good], norms, rtol=0, atol=1e-6 * norms.max())
    assert (layer.count, layer.nonfinite_count) == (ROWS, 2)


@pytest.mark.long
@pytest.mark.parametrize("parts", ["slices", "windows"])
def test_parts_of_a_batch(parts):
    weights = []
    for whole in (True, False):
        model = make_model()
        wrapped = wrap(model, clip_norm=0.1)
        optimizer = keras.optimizers.SGD(1.0)
        windows = parts == "windows" and not whole
        wrapped.compile(AccumulatingOptimizer(optimizer, steps=3) if windows else optimizer, "mse", run_eagerly=whole)
        if parts == "slices" and not whole:
            microbatch(wrapped, 2)
        callbacks = [ExactAccumulation()] if windows else []
        data = spoilt(X, np.nan), Y
        wrapped.fit(*data, batch_size=2 if windows else ROWS, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        assert np.isfinite(ours).all()


@pytest.mark.own_process
def test_replicas(mirrored):
    weights = []
    for strategy in (mirrored, tf.distribute.get_strategy()):
        with strategy.scope():
            model = make_model()
            wrapped = wrap(model, clip_norm=0.1)
            optimizer = AccumulatingOptimizer(keras.optimizers.SGD(1.0), steps=1)
            # Tracing takes longer than a step; test_replicas.py has clipped updates in graphs.
            wrapped.compile(optimizer, "mse", run_eagerly=True)
        wrapped.fit(spoilt(X, np.nan), Y, verbose=0, shuffle=False, callbacks=[ExactAccumulation()])
        weights.append(model.get_weights())
        assert wrapped.per_example.nonfinite_count == 2
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        assert np.isfinite(ours).all()


def test_a_loss_scale_that_is_too_large_is_lowered():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)], name="half")
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    wrapped = wrap(model, clip_norm=0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0**40)
    wrapped.compile(optimizer, "mse")
    x, y = some_inputs((ROWS, 6)), some_inputs((ROWS, 2))
    before = model.get_weights()
    wrapped.fit(x, y, verbose=0, shuffle=False)
    assert wrapped.per_example.nonfinite_count > 0
    assert float(optimizer.dynamic_scale) == 2.0**39
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # A target that is not finite is the example's own fault.
    optimizer.dynamic_scale.assign(1024.0)
    wrapped.fit(x, spoilt(y, np.nan), verbose=0, shuffle=False)
    assert float(optimizer.dynamic_scale) == 1024.0
    assert wrapped.per_example.nonfinite_count == 2
    assert not all(np.array_equal(*pair) for pair in zip(model.get_weights(), before, strict=True))
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.parametrize(("jit_compile", "training"), [(False, True), (True, False)])
def test_given_data(jit_compile, training):
    model = make_model()
    theirs = norms_of_data(model, X, Y, "mse", jit_compile=jit_compile, training=training)
    ours = norms_of_data(model, spoilt(X, np.nan), Y, "mse", jit_compile=jit_compile, training=training)
    assert np.isnan(ours[BAD]).all()
    good = np.setdiff1d(np.arange(ROWS), BAD)
    np.testing.assert_allclose(ours[good], theirs[good], rtol=0, atol=1e-6 * theirs.max())


def test_a_filter_leaves_them_out():
    model = make_model()
    wrapped = wrap(model, transform=lambda norms: tf.cast(norms < 1e6, "float32"))
    wrapped.compile("sgd", "mse", run_eagerly=True)
    wrapped.fit(spoilt(X, np.nan), Y, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_the_callback_counts_them():
    wrapped = wrap(make_model(), clip_norm=0.1)
    wrapped.compile("sgd", "mse", run_eagerly=True)
    examples = ExampleGradients(largest=3)
    history = wrapped.fit(
        spoilt(X, np.nan), Y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=[examples]
    ).history
    assert history["example_nonfinite_count"] == [2, 2]
    assert np.isfinite(history["example_norm_quantile_99"]).all()
    assert np.isfinite(examples.histogram[1]).all()
    assert examples.histogram[0].sum() == 4
    assert [largest.place for largest in examples.largest_norms[:2]] == BAD


@pytest.mark.few(1)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_clipping_by_norms_that_others_masks_change(reduction):
    words = keras.Input((4,), dtype="int32")
    model = keras.Model(words, layers.Dense(2)(layers.Embedding(5, 3, mask_zero=True)(words)))
    x, y = np.array([[1, 2, 3, 4], [1, 2, 0, 0]]), np.ones((2, 4, 2), "float32")
    norms = []
    for others in ([1, 2, 0, 0], [1, 2, 3, 4]):
        x[1] = others
        wrapped = wrap(model, clip_norm=1.0)
        wrapped.compile(keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError(reduction), run_eagerly=True)
        if reduction == "sum":
            wrapped.fit(x, y, verbose=0, shuffle=False)
        else:
            with pytest.warns(UserWarning, match="mean_squared_error averages.*reduction='sum'"):
                wrapped.fit(x, y, verbose=0, shuffle=False)
        norms.append(wrapped.per_example.norms[0])
    assert (abs(norms[0] - norms[1]) < 1e-6) == (reduction == "sum")
