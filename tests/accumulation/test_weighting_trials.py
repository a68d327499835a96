"""What a loss divides by is found by its gradients on made-up rows, and what is stated is held to them."""

import contextlib
import json
import logging

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from foreign.keras_io.losses import Switch
from hypothesis import given
from keras import layers, ops
from oracles.whole_batches import largest_difference
from runner.covering import examples

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.engine.probes.weighting_trial import try_weightings

# Of the whole gradient, with a learning rate of about 1.
TOLERANCE = 1e-6
ROWS, STEPS = 11, 6
generator = np.random.default_rng(0)
LENGTHS = generator.integers(1, STEPS + 1, ROWS)
PRESENT = np.arange(STEPS) < LENGTHS[:, None]
NUMBERS = generator.normal(size=(ROWS, STEPS, 4)).astype("float32")
TARGETS = generator.normal(size=(ROWS, STEPS, 3)).astype("float32")
WEIGHTS = generator.uniform(0.1, 2, ROWS).astype("float32")
# Padded with 0, labels with what is ignored.
TOKENS, LABELS = np.where(PRESENT, 1, 0), np.where(PRESENT, generator.integers(0, 3, PRESENT.shape), -100)


class Own(keras.Model):
    """Has a loss of its own: `losses(x, y, y_pred, sample_weight)`."""

    def __init__(self, losses, *first):
        super().__init__()
        self.first, self.kernel = list(first), layers.Dense(5, activation="tanh")
        self.head, self.own_loss = layers.Dense(3), losses

    def call(self, inputs):
        for layer in self.first:
            inputs = layer(inputs)
        return self.head(self.kernel(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(x, y, y_pred, sample_weight)


def squares(y, y_pred):
    return ops.square(y - y_pred)


def mean(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred))


def sum_of_all(x, y, y_pred, sample_weight):
    return 0.05 * ops.sum(squares(y, y_pred))


def sum_over_elements(x, y, y_pred, sample_weight):
    return ops.mean(ops.sum(squares(y, y_pred), (1, 2)))


def weighted(x, y, y_pred, sample_weight):
    return ops.sum(ops.mean(squares(y, y_pred), (1, 2)) * sample_weight) / ops.sum(sample_weight)


def by_output_mask(x, y, y_pred, sample_weight):
    mask = ops.cast(y_pred._keras_mask, y_pred.dtype)
    return ops.sum(ops.mean(squares(y, y_pred), -1) * mask) / ops.sum(mask)


def mean_over_steps(x, y, y_pred, sample_weight):
    """Of each example's unmasked steps, and then of the examples."""
    mask = ops.cast(y_pred._keras_mask, y_pred.dtype)
    return ops.mean(ops.sum(ops.mean(squares(y, y_pred), -1) * mask, -1) / ops.sum(mask, -1))


def present(y):
    return ops.cast(y != -100, "float32")


def by_labels(x, y, y_pred, sample_weight):
    """As of a language model: labels of -100 don't count."""
    losses = keras.losses.sparse_categorical_crossentropy(ops.maximum(y, 0), y_pred, from_logits=True)
    return ops.sum(losses * present(y)) / ops.sum(present(y))


def with_noise(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred + keras.random.normal(ops.shape(y_pred), seed=3)))


def of_positive_labels(x, y, y_pred, sample_weight):
    """Infinite where a label is 0, as those of classes may be."""
    return 0.05 * ops.sum(squares(ops.log(y), y_pred))


def of_large_outputs(x, y, y_pred, sample_weight):
    """NaN until outputs are above 20."""
    return ops.sum(squares(y, ops.log(y_pred - 20.0)))


def two_divisors(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred)) + 1e-3 * ops.sum(ops.square(y_pred))


def count_of_labels(x, y, y_pred, sample_weight):
    return ops.sum(present(y))


def embedding():
    return layers.Embedding(2, 4, mask_zero=True)


def masking():
    return layers.Masking(mask_value=-7.0)


PADDED = np.where(PRESENT[..., None], NUMBERS, -7).astype("float32")
# Of each loss, the data, the first layer and what is found.
LOSSES = {
    "mean": (mean, (NUMBERS, TARGETS), None, "'examples'"),
    "sum": (sum_of_all, (NUMBERS, TARGETS), None, "'sum'"),
    "sum over elements": (sum_over_elements, (NUMBERS, TARGETS), None, "'examples'"),
    "sample weights": (weighted, (NUMBERS, TARGETS, WEIGHTS), None, "'sample_weight'"),
    "positive labels": (of_positive_labels, (NUMBERS, np.exp(TARGETS)), None, "'sum'"),
    "unused weights": (mean, (NUMBERS, TARGETS, WEIGHTS), None, "'examples'"),
    "mask": (by_output_mask, (TOKENS, TARGETS), embedding, "'mask'"),
    "padding": (by_output_mask, (PADDED, TARGETS), masking, "'mask'"),
    "mean over steps": (mean_over_steps, (TOKENS, TARGETS), embedding, "'examples'"),
}


def model_of(loss, first=None, optimizer=None, **mode):
    keras.utils.set_random_seed(1)
    model = Own(loss, *([first()] if first else []))
    model.compile(optimizer or keras.optimizers.SGD(0.5), **mode)
    return model


def fit(model, data, batch_size=ROWS, **options):
    x, y, sample_weight = (*data, None)[:3]
    model.fit(x, y, sample_weight=sample_weight, batch_size=batch_size, shuffle=False, verbose=0, **options)
    return model


def in_slices(loss, data, first=None, weighting="auto", **mode):
    model = model_of(loss, first, **mode)
    with microbatch(model, 4, weighting=weighting):
        return fit(model, data)


def in_windows(loss, data, first=None, weighting="auto", **mode):
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.5), 3, weighting=weighting)
    return fit(model_of(loss, first, optimizer, **mode), data, 4, callbacks=[ExactAccumulation()])


def on_replicas(loss, data, first=None, weighting="auto", size=None, **options):
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False, weighting=weighting, **options)
    with dist.scope():
        model = model_of(loss, first, jit_compile=False)
    if size:
        microbatch(model, size, weighting=weighting)
    x, y, sample_weight = (*data, None)[:3]
    dist.fit(model, x, y, sample_weight=sample_weight, batch_size=ROWS, shuffle=False, verbose=0)
    return model


def whole(loss, data, first=None):
    return fit(model_of(loss, first, run_eagerly=True), data)


# What each is divided by, another one of LOSSES is, too.
ALIKE = ("sum over elements", "unused weights")


@pytest.mark.covering
@pytest.mark.parametrize("train", [in_slices, in_windows])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in LOSSES])
def test_it_is_found(name, train, caplog):
    loss, data, first, found = LOSSES[name]
    with caplog.at_level(logging.INFO, "keras_paragrad"):
        ours = train(loss, data, first, run_eagerly=True)
    assert largest_difference(ours, whole(loss, data, first)) < TOLERANCE
    (said,) = [each.getMessage() for each in caplog.records if "tried on made-up rows" in each.getMessage()]
    assert said.endswith(f"are weighted by weighting={found}.")


@pytest.mark.slow(30)
@pytest.mark.own_process
def test_it_is_found_on_replicas():
    for name, size in (("mask", None), ("sum", 2)):
        loss, data, first, _ = LOSSES[name]
        assert largest_difference(on_replicas(loss, data, first, size=size), whole(loss, data, first)) < TOLERANCE, name


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("name", LOSSES)
def test_each_is_found_on_replicas(name):
    loss, data, first, _ = LOSSES[name]
    for size in (None, 2):
        assert largest_difference(on_replicas(loss, data, first, size=size), whole(loss, data, first)) < TOLERANCE


def test_a_loss_with_random_numbers_is_tried_with_the_same_ones(caplog):
    """The gradients of parts add up if the numbers are those of the rows."""
    with caplog.at_level(logging.INFO, "keras_paragrad"):
        in_slices(with_noise, (NUMBERS, TARGETS), run_eagerly=True)
    assert "weighted by weighting='examples'" in caplog.text


@pytest.mark.covering
@pytest.mark.parametrize("train", [in_slices, in_windows])
@pytest.mark.parametrize(
    ("name", "stated", "says"),
    [
        ("mean", "sum", "'examples' fits, 'sum' is .* off. Write weighting='examples'"),
        ("sum", "examples", "'examples' is .* off, 'sum' fits. Write weighting='sum'"),
        ("sample weights", "examples", "'sample_weight' fits"),
        ("mask", "examples", "'mask' fits"),
        ("mean", count_of_labels, "count_of_labels is .* off, 'examples' fits"),
    ],
)
def test_what_is_stated_and_wrong_is_refused(name, stated, says, train):
    loss, data, first, _ = LOSSES[name]
    with pytest.raises(ValueError, match=f"is not what the loss of Own is divided by.*{says}"):
        train(loss, data, first, stated, run_eagerly=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("train", [in_slices, in_windows])
def test_a_function_states_what_no_name_does(train):
    """Keras's crossentropy rejects the label -100, so the loss is tried without and with it."""
    ours = train(by_labels, (TOKENS, LABELS), embedding, count_of_labels, run_eagerly=True)
    assert largest_difference(ours, whole(by_labels, (TOKENS, LABELS), embedding)) < TOLERANCE
    with pytest.raises(ValueError, match=r"must return one number.*keras.ops.sum"):
        train(by_labels, (TOKENS, LABELS), embedding, lambda x, y, y_pred, sample_weight: present(y), run_eagerly=True)


@pytest.mark.long
@pytest.mark.own_process
def test_a_function_on_replicas():
    ours = on_replicas(by_labels, (TOKENS, LABELS), embedding, count_of_labels)
    assert largest_difference(ours, whole(by_labels, (TOKENS, LABELS), embedding)) < TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [two_divisors, by_labels])
def test_what_no_name_states(loss):
    """Micro-batches are refused, and slices compute the loss on all outputs."""
    data, first = ((TOKENS, LABELS), embedding) if loss is by_labels else ((NUMBERS, TARGETS), None)
    with pytest.raises(ValueError, match=r"'examples' is .* off, .*weighting=lambda x, y, y_pred, sample_weight"):
        in_windows(loss, data, first, run_eagerly=True)
    assert largest_difference(in_slices(loss, data, first, run_eagerly=True), whole(loss, data, first)) < TOLERANCE


# What terms are divided by; the first three have names.
DIVISORS = {
    "examples": lambda y, weights: ops.cast(ops.shape(y)[0], "float32"),
    "sample_weight": lambda y, weights: ops.sum(weights),
    "sum": lambda y, weights: 1.0,
    "examples and one": lambda y, weights: ops.cast(ops.shape(y)[0], "float32") + 1.0,
    "root": lambda y, weights: ops.sqrt(ops.sum(weights)),
    "some": lambda y, weights: 0.1 + ops.sum(ops.cast(y > 0.5, "float32")),
}
TERMS = st.tuples(st.sampled_from(sorted(DIVISORS)), st.sampled_from([1.0, 2.0]), st.floats(0.2, 2.0), st.booleans())


def loss_of(terms):
    def loss(x, y, y_pred, sample_weight):
        total = 0.0
        for divisor, power, factor, weighted in terms:
            losses = ops.sum(ops.abs(y - y_pred) ** power, -1) * (sample_weight if weighted else 1.0)
            total += factor * ops.sum(losses) / DIVISORS[divisor](y, sample_weight)
        return total

    return loss


def fitting_by_hand(model, loss):
    """The weightings with which the gradients of each two parts of random rows add up, by one tape for each."""
    draw = np.random.default_rng(5)
    batch = [draw.uniform(size=(6, 4)), draw.uniform(size=(6, 3)), draw.uniform(0.2, 2, 6)]
    x, y, weights = (tf.constant(each.astype("float32")) for each in batch)

    def gradient(rows):
        with tf.GradientTape() as tape:
            value = loss(x[rows], y[rows], model(x[rows]), weights[rows])
        return np.concatenate([np.ravel(each) for each in tape.gradient(value, model.trainable_weights)])

    def fits(name):
        whole = slice(None)
        for cut in range(1, 6):
            parts = slice(None, cut), slice(cut, None)
            share = [float(DIVISORS[name](y[part], weights[part]) / DIVISORS[name](y, weights)) for part in parts]
            total = sum(each * gradient(part) for each, part in zip(share, parts, strict=True))
            if np.abs(total - gradient(whole)).max() > 1e-4 * np.abs(gradient(whole)).max():
                return False
        return True

    return [name for name in ("examples", "sample_weight", "sum") if fits(name)]


@examples(3)
@given(st.lists(TERMS, min_size=1, max_size=2))
def test_what_fits_is_what_fits_by_hand(terms):
    loss = loss_of(terms)
    model = model_of(loss)
    model(tf.zeros((1, 4)))
    specs = [tf.TensorSpec(shape) for shape in ((None, 4), (None, 3), (None,))]
    arguments = {**dict(zip(("x", "y", "sample_weight"), specs, strict=True)), "y_pred": None}
    trial = try_weightings(model, arguments, None)
    assert [each.name for each in trial.fitting if each.name != "mask"] == fitting_by_hand(model, loss)


def test_a_small_term_is_seen():
    def small(x, y, y_pred, sample_weight):
        return ops.mean(squares(y, y_pred)) + 1e-5 * ops.sum(squares(y, y_pred))

    with pytest.raises(ValueError, match=r"'examples' is 0\.0\d+% off"):
        in_windows(small, (NUMBERS, TARGETS), run_eagerly=True)


def scalar_mean(y, y_pred):
    return ops.mean(squares(y, y_pred))


def scalar_sum(y, y_pred):
    return 0.05 * ops.sum(squares(y, y_pred))


def dense(loss, optimizer, **layer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh", **layer), layers.Dense(3)])
    model.compile(optimizer, loss, run_eagerly=True)
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize("weighting", ["auto", "stated"])
@pytest.mark.parametrize(
    ("loss", "layer", "stated"),
    [
        (scalar_sum, {}, "sum"),
        ("mse", {"activity_regularizer": "l2"}, "examples"),
        (scalar_mean, {"kernel_regularizer": "l2"}, "examples"),
    ],
)
def test_numbers_of_whole_batches(loss, layer, stated, weighting):
    data = NUMBERS[:, 0], TARGETS[:, 0]
    expected = fit(dense(loss, keras.optimizers.SGD(0.5), **layer), data)
    accumulating = AccumulatingOptimizer(
        keras.optimizers.SGD(0.5), 3, weighting=stated if weighting != "auto" else "auto"
    )
    windows = fit(dense(loss, accumulating, **layer), data, 4, callbacks=[ExactAccumulation()])
    assert largest_difference(windows, expected) < TOLERANCE


def test_a_mask_that_hides_nothing_leaves_it_open():
    class Marks(layers.Layer):
        def call(self, inputs):
            return inputs + 0

        def compute_mask(self, inputs, mask=None):
            return ops.any(inputs != 123.0, -1)

    with pytest.raises(ValueError, match="mask of the output hides nothing.*takes 'examples'"):
        in_windows(by_output_mask, (NUMBERS, TARGETS), Marks, run_eagerly=True)


def test_gradients_that_are_not_finite_tell_nothing():
    """All weightings would fit them."""
    with pytest.raises(ValueError, match="could not be tried on made-up rows"):
        in_windows(of_large_outputs, (NUMBERS, TARGETS))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sum", r"divided by the number of examples \('examples' is .* off, 'sum' fits\)"),
        ("mask", "'mask' fits"),
        ("mean", None),
    ],
)
def test_uniform_says_what_it_needs(name, says):
    loss, data, first, _ = LOSSES[name]
    with contextlib.ExitStack() as warned:
        messages = (f"a loss that is a mean.*{says}", "parts are .* off .* weights all parts equally")
        for message in messages if says else ():
            warned.enter_context(pytest.warns(UserWarning, match=message))
        in_windows(loss, data, first, "uniform", run_eagerly=True)


def test_a_function_is_saved_as_keras_saves_functions():
    registered = keras.saving.register_keras_serializable("tests")(count_of_labels)
    optimizer = AccumulatingOptimizer("sgd", 2, weighting=registered)
    config = keras.saving.serialize_keras_object(optimizer)
    assert json.loads(json.dumps(config)) == config
    loaded = keras.saving.deserialize_keras_object(config)
    assert loaded.weighting is registered
    with pytest.raises(ValueError, match="`weighting` is 3, .* or a function of"):
        AccumulatingOptimizer("sgd", 2, weighting=3)


def test_a_lambda_is_saved_with_the_warning_of_keras():
    optimizer = AccumulatingOptimizer("sgd", 2, weighting=lambda x, y, y_pred, sample_weight: ops.sum(sample_weight))
    with pytest.warns(UserWarning, match="lambda"):
        optimizer.get_config()


class Gate(keras.layers.Layer):
    """Adds a product of means, one of them of a threshold: of rows above it, it is a mean."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.cast(x > -1, "float32")) * keras.ops.mean(self.scale * x))
        return x


def test_only_rows_that_are_far_apart_tell():
    model = keras.Sequential([keras.Input((4,)), Gate(), keras.layers.Dense(1)])
    model.compile(AccumulatingOptimizer("sgd", 2), "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    with pytest.raises(ValueError, match="A layer adds a loss"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[ExactAccumulation()])


def test_experts_that_get_no_rows_at_first():
    """The router's bias sends all tokens to one expert, so the losses add up until it is trained."""
    switch = Switch()
    inner = [keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 4), switch]
    model = keras.Sequential([*inner, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    switch.router.bias.assign([0.3, 0.0])
    model.compile(AccumulatingOptimizer("sgd", 2), "mse")
    x = np.random.default_rng(0).integers(0, 20, (8, 6))
    with pytest.raises(ValueError, match="A layer adds a loss"):
        model.fit(x, x[:, :1].astype("float32"), batch_size=4, verbose=0, callbacks=[ExactAccumulation()])
