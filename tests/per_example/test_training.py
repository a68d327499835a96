"""`fit` with the layer: what it trains, and what it leaves behind."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.whole_batches import example_gradients, gradient_error, norms_of
from runner.covering import examples
from sample_models.cases import OPTIMIZERS

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, PerExampleGradients, microbatch, wrap

EXECUTIONS = [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}]
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
ROWS = 22


def make_model(regularizer=None, dropout=0.0):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Conv1D(5, 3, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dropout(dropout),
            layers.Flatten(),
            layers.Dense(6, activation="silu", kernel_regularizer=regularizer),
            layers.Dense(3),
        ]
    )


def data(weighted=False):
    generator = np.random.default_rng(4)
    x = generator.normal(size=(ROWS, 6, 4)).astype("float32")
    y = generator.integers(0, 3, ROWS)
    weight = generator.uniform(0.1, 3, ROWS).astype("float32")
    weight[-1] = 0
    return (x, y, weight) if weighted else (x, y)


def own_loss(y_pred, y, weight=None):
    """An example's own loss, from a batch of one."""
    value = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
    return value if weight is None else value * weight[0]


def crossentropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def fit(model, rows, batch_size=8, epochs=1, **more):
    x, y, *weight = (part[:rows] for part in data(more.pop("weighted", False)))
    model.fit(
        x,
        y,
        sample_weight=weight[0] if weight else None,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **more,
    )


@pytest.mark.long
@pytest.mark.parametrize("quantity", ["norms", "gradients", "second_moment"])
@examples(2)
@hypothesis.given(
    execution=st.sampled_from(EXECUTIONS),
    rows=st.sampled_from([22, 19, 16, 5]),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
)
def test_what_is_left_is_the_last_batch_s_loop(quantity, execution, rows, reduction, weighted):
    model = make_model("l2" if reduction != "sum" else None)
    wrapped = wrap(model, quantity=quantity, capacity=8 if execution.get("jit_compile") else None)
    wrapped.compile(keras.optimizers.SGD(0.0), crossentropy(reduction), **execution)
    fit(wrapped, rows, weighted=weighted)

    last = slice((rows - 1) // 8 * 8, rows)
    x, *others = (part[last] for part in data(weighted))
    theirs = example_gradients(model, x, own_loss, *others)
    layer = wrapped.per_example
    assert layer.count == len(x)
    if quantity == "norms":
        assert layer.norms.dtype == np.float32
        assert np.abs(layer.norms - norms_of(theirs)).max() / norms_of(theirs).max() < 1e-6
    elif quantity == "gradients":
        assert gradient_error(layer.gradients, theirs) < 1e-6
    else:
        squares = [np.square(gradient).sum(0) for gradient in theirs]
        assert gradient_error(layer.second_moment, squares, np.square(norms_of(theirs)).sum()) < 1e-6


@functools.cache
def trained_in_a_graph(optimizer, quantity=None):
    """The weights after training, in plain Keras if no quantity is asked for."""
    model = make_model("l2", dropout=0.3)
    model = wrap(model, quantity=quantity) if quantity else model
    made = getattr(keras.optimizers, optimizer)(0.01, use_ema=True, ema_momentum=0.9)
    model.compile(made, crossentropy(), jit_compile=False)
    fit(model, ROWS, epochs=2, weighted=True)
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.long
@pytest.mark.parametrize(
    ("optimizer", "quantity"),
    [
        ("Adam", "norms"),
        ("Adam", "gradients"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("SGD", "gradients"), ("Muon", "second_moment"))),
    ],
)
def test_training_is_the_same_to_the_bit(quantity, optimizer):
    for ours, theirs in zip(trained_in_a_graph(optimizer, quantity), trained_in_a_graph(optimizer), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def clipped_by_the_loop(model, optimizer, clip, reduction, rows, weighted, regularizer):
    """Trains with the clipped sum of gradients that were each computed alone."""
    for start in range(0, rows, 8):
        x, *others = (part[:rows][start : start + 8] for part in data(weighted))
        gradients = example_gradients(model, x, own_loss, *others)
        weights = clip(norms_of(gradients))
        divisor = 1 if reduction == "sum" else len(x)
        if reduction == "mean_with_sample_weight" and weighted:
            divisor = others[-1].sum()
        sums = [tf.constant(np.tensordot(weights, gradient, 1) / divisor, tf.float32) for gradient in gradients]
        with tf.GradientTape() as tape:
            penalty = tf.add_n(model.losses) if regularizer else tf.constant(0.0)
        variables = [variable.value for variable in model.trainable_variables]
        penalties = tape.gradient(penalty, variables, unconnected_gradients="zero")
        optimizer.apply([a + b for a, b in zip(sums, penalties, strict=True)], model.trainable_variables)


@examples(2)
@hypothesis.given(
    execution=st.sampled_from(EXECUTIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    rows=st.sampled_from([22, 19, 16, 5]),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
    clip_norm=st.sampled_from([0.3, 1.0, 100.0]),
    transforms=st.booleans(),
)
def test_a_clipped_update_is_the_loop_s(execution, optimizer, rows, reduction, weighted, clip_norm, transforms):
    regularizer = None if reduction == "sum" else "l2"
    options = {"transform": lambda norms: 1 / (norms + clip_norm)} if transforms else {"clip_norm": clip_norm}

    def clip(norms):
        if transforms:
            return 1 / (norms + clip_norm)
        return np.minimum(1, clip_norm / np.maximum(norms, 1e-30))

    ours, theirs = make_model(regularizer), make_model(regularizer)
    # Not so small that what rounding leaves of a zero gradient is a step.
    arguments = {"epsilon": 1e-3} if optimizer in ("Adam", "AdamW", "RMSprop", "Nadam", "Adamax", "Lamb") else {}
    arguments = {"learning_rate": 0.01, **arguments}
    make = getattr(keras.optimizers, optimizer)
    wrapped = wrap(ours, **options)
    wrapped.compile(make(**arguments), crossentropy(reduction), **execution)
    fit(wrapped, rows, weighted=weighted)
    clipped_by_the_loop(theirs, make(**arguments), clip, reduction, rows, weighted, regularizer)
    difference = max(np.abs(a - b).max() for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True))
    assert difference < 2e-6


# In graphs of plain steps, training is the same to the bit.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "execution",
    [
        pytest.param(each, marks=[pytest.mark.long] * ("run_eagerly" not in each and not each.get("jit_compile")))
        for each in EXECUTIONS
    ],
    ids=str,
)
def test_an_infinite_clip_is_plain_training(execution):
    weights = []
    # XLA compiles a step for each size of a batch.
    rows = 16 if execution.get("jit_compile") else ROWS
    for make, how in ((make_model, {"run_eagerly": True}), (lambda: wrap(make_model(), clip_norm=math.inf), execution)):
        model = make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), crossentropy(), **how)
        fit(model, rows, epochs=2, weighted=True)
        weights.append([variable.numpy() for variable in model.trainable_variables])
    assert max(np.abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6


def test_an_activity_regularizer_counts_as_part_of_the_loss():
    weights = []
    for clip_norm in (None, 1e9):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((6, 4)), layers.Dense(4, activity_regularizer="l2"), layers.Flatten(), layers.Dense(3)]
        )
        wrapped = wrap(model, clip_norm=clip_norm)
        wrapped.compile(keras.optimizers.SGD(0.1), crossentropy(), run_eagerly=clip_norm is None)
        fit(wrapped, ROWS)
        weights.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6


# What half precision rounds: 10 bits of a float16 and 7 of a bfloat16, over a few layers.
@pytest.mark.few(0, "False-mixed_float16-0.004")
@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)])
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_half_precision(policy, tolerance, jit_compile):
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model()
        kept = {}
        for name, options in {"norms": {}, "gradients": {"quantity": "gradients", "capacity": 8}}.items():
            wrapped = wrap(model, **options)
            # One of them is traced.
            eagerly = policy == "mixed_bfloat16" and not jit_compile
            wrapped.compile(keras.optimizers.SGD(0.0), crossentropy(), jit_compile=jit_compile, run_eagerly=eagerly)
            assert isinstance(wrapped.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
            fit(wrapped, ROWS)
            kept[name] = getattr(wrapped.per_example, name)
        x, y = (part[16:] for part in data())
    finally:
        keras.config.set_dtype_policy("float32")
    exact = make_model()
    exact.set_weights(model.get_weights())
    theirs = example_gradients(exact, x, own_loss, y)
    assert kept["norms"].dtype == np.float32
    assert np.abs(kept["norms"] - norms_of(theirs)).max() / norms_of(theirs).max() < tolerance
    assert gradient_error(kept["gradients"], theirs) < tolerance


def test_clipping_within_an_accumulating_optimizer_is_clipping_of_the_whole_batch():
    weights = []
    for batch_size, steps in ((4, 2), (8, 1)):
        model = make_model()
        wrapped = wrap(model, clip_norm=0.5)
        optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.1), steps=steps)
        wrapped.compile(optimizer, crossentropy(), run_eagerly=steps == 1)
        fit(wrapped, 22, batch_size=batch_size, callbacks=[ExactAccumulation()])
        weights.append(model.get_weights())
        assert wrapped.per_example.count == (22 - 1) % batch_size + 1
    assert max(np.abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6


@pytest.mark.long
def test_clipping_within_microbatches_is_clipping_of_the_whole_batch():
    weights = []
    for size in (3, 8):
        model = make_model()
        wrapped = wrap(model, clip_norm=0.5)
        wrapped.compile(keras.optimizers.SGD(0.1), crossentropy(), run_eagerly=size == 8)
        with microbatch(wrapped, size=size):
            fit(wrapped, 22)
        weights.append(model.get_weights())
    assert max(np.abs(a - b).max() for a, b in zip(*weights, strict=True)) < 1e-6


def test_a_single_layer_of_a_model():
    layer = PerExampleGradients(layers.Dense(3), quantity="gradients")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6, 4)), layers.Flatten(), layers.Dense(5, activation="tanh"), layer])
    model.compile(keras.optimizers.SGD(0.0), crossentropy(), run_eagerly=True)
    fit(model, ROWS)
    ours = layer.gradients
    x, y = (part[16:] for part in data())
    theirs = example_gradients(model, x, own_loss, y)[-2:]
    assert gradient_error(ours, theirs) < 1e-6


@pytest.mark.parametrize(
    "compiled", [None, pytest.param({"jit_compile": False}, marks=pytest.mark.long), {"jit_compile": True}], ids=str
)
def test_a_loop_of_one_s_own(compiled):
    layer = PerExampleGradients(make_model())
    x, y = (tf.constant(part[:8]) for part in data())

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, layer(x), from_logits=True))
        return tape.gradient(loss, [variable.value for variable in layer.trainable_variables])

    (step if compiled is None else tf.function(step, **compiled))()
    theirs = norms_of(example_gradients(layer.layer, x.numpy(), own_loss, y.numpy()))
    assert np.abs(layer.norms - theirs).max() / theirs.max() < 1e-6


@pytest.mark.long
def test_validation_prediction_and_evaluation_leave_the_results_alone():
    model = make_model()
    wrapped = wrap(model)
    wrapped.compile("sgd", crossentropy(), run_eagerly=True)
    model.run_eagerly = True
    fit(wrapped, ROWS, validation_data=data())
    before = wrapped.per_example.norms
    np.testing.assert_array_equal(wrapped.predict(data()[0], verbose=0), model.predict(data()[0], verbose=0))
    wrapped.evaluate(*data(), verbose=0)
    np.testing.assert_array_equal(wrapped.per_example.norms, before)
    assert len(before) == ROWS - 16
