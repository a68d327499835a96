"""Whether a loss compares the examples of a batch with each other, found by a trial on synthetic rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Batch, LossArguments, Structure
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.row_independence import has_value_per_example
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    PureFunction,
    call_model,
    change_rows,
    gradients_match,
    run_trial,
    synthetic_rows,
    take_rows,
    uses_half_precision,
    watch_weights,
)

_ROWS = 8
# The size of the first of two parts: they have different sizes.
_FIRST = 3
# Whether targets are labels, and the range of predictions: probabilities, logits, embeddings.
_DRAWS = ((True, 0.1, 0.9), (True, -3.0, 3.0), (False, -3.0, 3.0))
# How many samples of a random loss are averaged.
_SAMPLES = 16
# Rows before, between and after those that are compared, to find pairs of neighbours.
_CHANGED = [0, 3]


def loss_mixes_rows(term: LossTerm, *, one_value_each: bool = False) -> bool:
    """Whether a loss's value for an example changes with the other examples in its batch, or with their number.

    `False` also if the loss can't be called on synthetic rows, or returns a scalar. If `one_value_each`, a loss that
    flattens examples and their elements counts as mixing.
    """
    compute = tf.function(lambda y_true, y_pred: LossTerm(term.loss, y_true, y_pred, None).values, autograph=False)

    def find(draws: tuple[tuple[bool, float, float], ...]) -> bool:
        if has_value_per_example(term.loss):
            return False
        answers, failures = [], []
        for draw in draws:
            try:
                answers.append(_mixes(term, compute, one_value_each, *draw))
            except Exception as error:
                # A loss of embeddings may reject labels, and one of probabilities logits.
                failures.append(error)
        if not answers:
            raise failures[0]
        return any(answers)

    return run_trial(find, _DRAWS, otherwise=False, question=f"whether the loss {term.loss.name!r} compares examples")


def gradients_of_parts_add_up(
    model: keras.Model, arguments: LossArguments, *normalizers: Callable[[LossArguments], Normalizer]
) -> bool:
    """Whether a batch's gradient, times one of several divisors, is the sum of those of its two parts.

    Replicas and micro-batches rely on that. Losses alone would show less: before training, predictions may be all the
    same, and so is every mean of their losses. Of a random loss, means over samples are compared. `True` also if the
    loss can't be computed on synthetic rows.
    """

    def of_parts(data: LossArguments):
        """Gradients and loss, and what the loss may divide by: times that, those of parts sum to those of the whole."""
        x, sample_weight, y = data
        with watch_weights(model) as gradients_of:
            y_pred = call_model(model, (x,), training=False)
            inputs = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
            # Of an unreduced loss, Keras differentiates the sum.
            loss = tf.cast(tf.reduce_sum(model._compute_loss(**inputs, training=True)), "float32")
        gradients = gradients_of(loss)
        if not gradients:
            raise Inconclusive("the loss has no gradient")
        divisors = [each(inputs) for each in normalizers]
        return gradients, loss, [tf.constant(1.0) if each.summed else each.value for each in divisors]

    def find(size: int):
        x, y, weights = (arguments[name] for name in ("x", "y", "sample_weight"))
        targets = synthetic_rows(y, _ROWS, seed=0, size=size, labels=True)
        data = [*synthetic_rows((x, weights), _ROWS, seed=1, size=size), targets]
        compute, half_precision = PureFunction(model, of_parts), uses_half_precision(model)
        parts = [take_rows(data, *rows) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
        whole, reseeded = compute(data)[0], compute(data, compute.reseed())[0]
        choices = range(len(normalizers))
        if not gradients_match(whole[0], reseeded[0], half_precision=half_precision):
            return any(_add_up_on_average(compute, data, parts, choice) for choice in choices)
        first, second = (compute(part)[0] for part in parts)

        def add_up(choice: int) -> bool:
            one, other, both = ([each * result[2][choice] for each in result[0]] for result in (first, second, whole))
            summed = [one + other for one, other in zip(one, other, strict=True)]
            return gradients_match(both, summed, half_precision=half_precision)

        return any(map(add_up, choices))

    # Of several divisors none is stated, and the loss is refused unless the trial shows more.
    question = "whether the loss is divided by what `weighting` says" if len(normalizers) == 1 else None
    return run_trial(find, *SIZES, otherwise=True, question=question)


def _add_up_on_average(compute: PureFunction, data: Batch, parts: list[Batch], choice: int) -> bool:
    """Whether random losses of the parts may sum to the batch's: a wrong divisor is usually off by a multiple."""

    def losses(rows: Batch, offset: int) -> np.ndarray:
        states = (compute.reseed(by=offset + draw) for draw in range(_SAMPLES))
        results = (compute(rows, state)[0] for state in states)
        return np.array([float(loss * divisors[choice]) for _, loss, divisors in results])

    whole = losses(data, 0)
    summed = np.sum([losses(part, _SAMPLES * number) for number, part in enumerate(parts, 1)], axis=0)
    error = np.sqrt((whole.var() + summed.var()) / _SAMPLES)
    return abs(whole.mean() - summed.mean()) <= max(0.1 * abs(whole.mean()), 5 * error)


def _mixes(
    term: LossTerm, compute: Callable[..., tf.Tensor], one_value_each: bool, labels: bool, low: float, high: float
) -> bool:
    """Whether the losses of some rows change when other rows do, or when the batch is split."""

    def values(y_true: Structure, y_pred: Structure) -> np.ndarray:
        losses = np.asarray(compute(y_true, y_pred), "float64")
        # The elements of an example may be flattened with the examples.
        rows = len(keras.tree.flatten(y_pred)[0])
        return losses if len(losses) % rows or one_value_each else losses.reshape(rows, -1)

    def match(one: np.ndarray, other: np.ndarray) -> bool:
        return np.allclose(one, other, atol=1e-5 * np.abs(one[np.isfinite(one)]).max(initial=1.0), equal_nan=True)

    def draw(seed: int) -> tuple[Any, Any]:
        y_true = synthetic_rows(term.y_true, _ROWS, seed=seed, labels=labels)
        return y_true, synthetic_rows(term.y_pred, _ROWS, seed=seed + 1, low=low, high=high)

    whole, changed = change_rows(draw(0), draw(2), _CHANGED)
    before, after = values(*whole), values(*changed)
    if before.shape[:1] != (_ROWS,):
        return True
    if not match(before, values(*whole)):
        raise Inconclusive("the loss is random")
    unchanged = [row for row in range(_ROWS) if row not in _CHANGED]
    if not match(before[unchanged], after[unchanged]):
        return True
    try:
        parts = [values(*take_rows(whole, *rows)) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
    except Exception:
        # Such as a loss of pairs, for an odd number of rows.
        return True
    return not match(before, np.concatenate(parts))
