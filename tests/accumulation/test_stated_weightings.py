"""What a loss is divided by is stated where Keras doesn't say it, and held to the first update's outputs."""

import functools
import json

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracles.in_parts import (
    WHOLE,
    check,
    in_slices,
    in_windows,
    model_of,
    on_replicas,
    refusal_in_windows,
)

from keras_paragrad import AccumulatingOptimizer, microbatch, recompute

ROWS, TIMES = 44, 6
generator = np.random.default_rng(1)
PRESENT = np.arange(TIMES) < generator.integers(1, TIMES + 1, (ROWS, 1))
NUMBERS, TARGETS = (generator.normal(size=(ROWS, TIMES, size)).astype("float32") for size in (4, 3))
WEIGHTS = generator.uniform(0.1, 2, ROWS).astype("float32")
# Padded with 0, labels with what is ignored.
TOKENS, LABELS = np.where(PRESENT, 1, 0), np.where(PRESENT, generator.integers(0, 3, PRESENT.shape), -100)
PADDED = np.where(PRESENT[..., None], NUMBERS, -7).astype("float32")


class OwnLoss(keras.Model):
    """Has a loss of its own: `losses(x, y, y_pred, sample_weight)`."""

    def __init__(self, losses, *first):
        super().__init__()
        self.first, self.hidden = [make() for make in first], layers.Dense(5, activation="tanh")
        self.head, self.own_loss = layers.Dense(3), losses

    def call(self, inputs):
        for layer in self.first:
            inputs = layer(inputs)
        return self.head(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(x, y, y_pred, sample_weight)


def own_loss(losses, *first, optimizer=None, **compiled):
    keras.utils.set_random_seed(0)
    model = OwnLoss(losses, *first)
    model.compile(optimizer or keras.optimizers.SGD(0.5), **{"jit_compile": False, **compiled})
    return model


def squares(y, y_pred):
    return ops.square(y - y_pred)


def mean(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred))


def sum_of_all(x, y, y_pred, sample_weight):
    return 0.02 * ops.sum(squares(y, y_pred))


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


def by_labels(x, y, y_pred, sample_weight):
    """As of a language model: labels of -100 don't count."""
    losses = keras.losses.sparse_categorical_crossentropy(ops.maximum(y, 0), y_pred, from_logits=True)
    return ops.sum(losses * ops.cast(y != -100, "float32")) / count_of_labels(x, y, y_pred, sample_weight)


def count_of_labels(x, y, y_pred, sample_weight):
    return ops.sum(ops.cast(y != -100, "float32"))


def positive_targets(x, y, y_pred, sample_weight):
    return 1.0 + ops.sum(ops.cast(y > 0, "float32"))


def two_divisors(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred)) + 1e-3 * ops.sum(ops.square(y_pred))


def a_small_term(x, y, y_pred, sample_weight):
    return ops.mean(squares(y, y_pred)) + 1e-5 * ops.sum(squares(y, y_pred))


def embedding():
    return layers.Embedding(2, 4, mask_zero=True)


def masking():
    return layers.Masking(mask_value=-7.0)


# Of each model, the data, what the loss is divided by, what it isn't, and what is found in its place.
LOSSES = {
    "mean": ([mean], (NUMBERS, TARGETS), "examples", "sum"),
    "sum": ([sum_of_all], (NUMBERS, TARGETS), "sum", "examples"),
    "sample weights": ([weighted], (NUMBERS, TARGETS, WEIGHTS), "sample_weight", "examples"),
    "mask": ([by_output_mask, embedding], (TOKENS, TARGETS), "mask", "examples"),
    "labels": ([by_labels, embedding], (TOKENS, LABELS), count_of_labels, "sum"),
    "sum over elements": ([sum_over_elements], (NUMBERS, TARGETS), "examples", positive_targets),
    "unused weights": ([mean], (NUMBERS, TARGETS, WEIGHTS), "examples", "sample_weight"),
    "padding": ([by_output_mask, masking], (PADDED, TARGETS), "mask", "sum"),
    "mean over steps": ([mean_over_steps, embedding], (TOKENS, TARGETS), "examples", "mask"),
}


def case(name):
    arguments, data, right, wrong = LOSSES[name]
    data = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    return functools.partial(own_loss, *arguments), data, right, wrong


def written(weighting):
    return weighting.__name__ if callable(weighting) else repr(weighting)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOSSES)
def test_windows_need_what_the_error_names(name):
    make, data, right, _ = case(name)
    says = refusal_in_windows(make, **data)
    assert "OwnLoss defines its own compute_loss" in says
    assert ("a function of (x, y, y_pred, sample_weight)" if callable(right) else repr(right)) in says
    check(in_windows, make, how={"weighting": right}, **data)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_slices_need_none(name, caplog):
    caplog.set_level("INFO", "keras_paragrad")
    make, data, right, _ = case(name)
    check(in_slices, make, **data)
    assert caplog.text.count(WHOLE) == 1
    check(in_slices, make, how={"weighting": right}, **data)
    assert caplog.text.count(WHOLE) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["mask", *LOSSES])
def test_replicas_need_none(name):
    make, data, right, _ = case(name)
    check(on_replicas, make, **data)
    check(on_replicas, make, how={"weighting": right}, **data)


def test_fixed_parts_need_one():
    make, data, right, _ = case("mean")
    with pytest.raises(ValueError, match=r"deterministic=10 .*OwnLoss defines its own compute_loss.*'examples'"):
        in_slices(make, deterministic=10, **data)
    check(in_slices, make, how={"deterministic": 10, "weighting": right}, **data)


@pytest.mark.few(1, "mean")
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_wrong_is_refused_if_another_fits(name):
    make, data, right, wrong = case(name)
    says = refusal_in_windows(make, wrong, **data)
    assert f"weighting={written(wrong)} is not what the loss of 'own_loss' is divided by" in says
    assert f"weighting={'mask' if callable(right) else right!r} fits".replace("=mask", "='mask'") in says


def test_what_is_wrong_is_refused_in_slices():
    make, data, _, wrong = case("sample weights")
    with pytest.raises(ValueError, match="'examples' is not what the loss .*'sample_weight' fits"):
        in_slices(make, wrong, **data)


@pytest.mark.parametrize(("loss", "train"), [(two_divisors, in_windows), (a_small_term, in_slices)])
def test_what_is_wrong_is_warned_of_if_none_fits(loss, train):
    with pytest.warns(UserWarning, match=r"the (gradient of the )?loss .* in parts is .* off .*'examples' as stated"):
        train(functools.partial(own_loss, loss), "examples", x=NUMBERS, y=TARGETS)


class Tracking(OwnLoss):
    def __init__(self):
        super().__init__(mean)
        self.largest = keras.metrics.Mean("largest")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.largest.update_state(ops.max(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_metrics_that_a_loss_updates_are_warned_of():
    model = Tracking()
    model.compile("sgd", jit_compile=False)
    with pytest.warns(UserWarning, match="The metrics largest, which"), microbatch(model, 4, weighting="examples"):
        model.fit(NUMBERS, TARGETS, batch_size=ROWS, verbose=0)


def test_a_function_returns_one_number():
    make, data, *_ = case("labels")
    with pytest.raises(ValueError, match=r"must return one number.*keras.ops.sum"):
        in_windows(make, lambda x, y, y_pred, sample_weight: ops.cast(y != -100, "float32"), **data)


class Adds(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, inputs):
        self.add_loss(0.1 * self.loss(ops.square(inputs)))
        return inputs


# Of each, the layers that add a loss, the loss, and what it is divided by.
NUMBERS_OF_BATCHES = {
    "a mean": ([], lambda y, p: ops.mean(squares(y, p)), "examples"),
    "a sum": ([], lambda y, p: 0.05 * ops.sum(squares(y, p)), "sum"),
    "an added mean": ([lambda: Adds(ops.mean)], "mse", "examples"),
    "a regularizer of outputs": ([lambda: layers.ActivityRegularization(l2=0.1)], "mse", "examples"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NUMBERS_OF_BATCHES)
def test_a_loss_of_one_number(name):
    more, loss, right = NUMBERS_OF_BATCHES[name]
    make = functools.partial(model_of, *more, loss=loss)
    assert repr(right) in refusal_in_windows(make)
    check(in_windows, make, how={"weighting": right})
    if not more:
        check(in_slices, make)


@pytest.mark.parametrize(
    ("loss", "weighting"), [("mse", "examples"), (keras.losses.MeanSquaredError(reduction="sum"), "auto")]
)
def test_losses_that_recomputed_layers_add(loss, weighting):
    def make(**how):
        return model_of(lambda: layers.Dense(6), lambda: Adds(ops.mean), loss=loss, **how)

    check(
        lambda make, **how: in_slices(lambda **more: recompute(make(**more), every=1).model, **how),
        make,
        how={"weighting": weighting},
    )


def square_of_mean(values):
    return ops.sum(ops.square(ops.mean(values, 0)))


@pytest.mark.parametrize("loss", [ops.sum, square_of_mean])
def test_what_layers_add_is_warned_of(loss):
    with pytest.warns(UserWarning, match="losses that layers of .* add are .* off in parts .*'examples' as stated"):
        in_slices(functools.partial(model_of, lambda: Adds(loss)), "examples")


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
