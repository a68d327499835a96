"""Whether a loss compares the examples of a batch with each other, found by computing it on made-up rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.built_in import values_are_of_examples
from keras_paragrad.engine.probes.gradients import alike, watched
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Pure,
    Unknown,
    attempt,
    called,
    is_coarse,
    made_up,
    some_rows,
    with_changed_rows,
)
from keras_paragrad.engine.step.forward import Normalizer

_ROWS = 8
# Into parts of different sizes.
_FIRST = 3
# Whether targets are labels, and between what predictions are: probabilities, logits, embeddings.
_DRAWS = ((True, 0.1, 0.9), (True, -3.0, 3.0), (False, -3.0, 3.0))
# How often a random loss is drawn.
_TIMES = 16
# Rows before, between and after those that are compared, so that pairs of neighbours are found.
_CHANGED = [0, 3]


def mixes_rows(term: LossTerm, *, one_value_each: bool = False) -> bool:
    """Whether a loss gives an example another value when the other examples in its batch change, or their number.

    Args:
        term: The loss and what it is called with, of which only shapes and dtypes count.
        one_value_each: Whether a loss that has not one row of values for each example counts as one that does.

    Returns:
        `False` also where the loss could not be called on made-up rows, or returns one number for all of them.
    """
    compute = tf.function(lambda y_true, y_pred: LossTerm(term.loss, y_true, y_pred, None).values, autograph=False)

    def find(draws: tuple[tuple[bool, float, float], ...]) -> bool:
        if values_are_of_examples(term.loss):
            return False
        answers, failures = [], []
        for draw in draws:
            try:
                answers.append(_mixes(term, compute, one_value_each, *draw))
            except Exception as error:
                # Labels need not suit a loss of embeddings, nor logits one of probabilities.
                failures.append(error)
        if not answers:
            raise failures[0]
        return any(answers)

    return attempt(find, _DRAWS, otherwise=False, question=f"whether the loss {term.loss.name!r} compares examples")


def parts_make_up_the_whole(
    model: Any, arguments: dict[str, Any], normalize: Callable[[dict[str, Any]], Normalizer]
) -> bool:
    """Whether the gradient of a model's loss, times what that was divided by, is the sum of those of two parts.

    That is what replicas and micro-batches rely on. The parts have different sizes. Losses would tell less: where
    predictions are all alike, as they are before training, every mean of them is the same.

    Args:
        model: A built and compiled model.
        arguments: Those of its `compute_loss`, of which only shapes and dtypes count.
        normalize: From such arguments to the stated divisor of the loss.

    Returns:
        `True` also where the loss could not be computed on made-up rows. Of a random one, averages are compared.
    """

    def undivided(data):
        x, sample_weight, y = data
        with watched(model) as gradients_of:
            given = {"x": x, "y": y, "y_pred": called(model, (x,), training=False), "sample_weight": sample_weight}
            # Of several values, Keras differentiates the sum.
            loss = tf.cast(tf.reduce_sum(model._compute_loss(**given, training=True)), "float32")
        gradients, weight = gradients_of(loss), normalize(given)
        if not gradients:
            raise Unknown("the loss has no gradient")
        factor = 1.0 if weight.summed else weight.value
        return [gradient * factor for gradient in gradients], loss * factor

    def find(size):
        x, y, weights = (arguments[name] for name in ("x", "y", "sample_weight"))
        targets = made_up(y, _ROWS, seed=0, size=size, labels=True)
        data = [*made_up((x, weights), _ROWS, seed=1, size=size), targets]
        compute = Pure(model, undivided)
        split = [some_rows(data, *rows) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
        (whole, _), (other, _) = compute(data)[0], compute(data, compute.with_other_seeds())[0]
        coarse = is_coarse(model)
        if not alike(whole, other, coarse=coarse):
            return _add_up_on_average(compute, data, split)
        parts = [compute(part)[0][0] for part in split]
        return alike(whole, [one + other for one, other in zip(*parts, strict=True)], coarse=coarse)

    return attempt(find, *SIZES, otherwise=True, question="whether the loss is divided by what `weighting` says")


def _add_up_on_average(compute: Pure, data: Any, parts: list[Any]) -> bool:
    """Whether random losses of parts may sum to that of the whole: a wrong divisor is mostly wrong by a multiple."""

    def losses(rows, offset):
        states = (compute.with_other_seeds(by=offset + draw) for draw in range(_TIMES))
        return np.array([float(compute(rows, state)[0][1]) for state in states])

    whole = losses(data, 0)
    summed = np.sum([losses(part, _TIMES * number) for number, part in enumerate(parts, 1)], axis=0)
    error = np.sqrt((whole.var() + summed.var()) / _TIMES)
    return abs(whole.mean() - summed.mean()) <= max(0.1 * abs(whole.mean()), 5 * error)


def _mixes(term: LossTerm, compute: Any, one_value_each: bool, labels: bool, low: float, high: float) -> bool:
    def values(y_true, y_pred):
        found = np.asarray(compute(y_true, y_pred), "float64")
        # Values of several elements of an example may be flattened with the examples.
        rows = len(keras.tree.flatten(y_pred)[0])
        return found if len(found) % rows or one_value_each else found.reshape(rows, -1)

    def are_alike(one, other):
        return np.allclose(one, other, atol=1e-5 * np.abs(one[np.isfinite(one)]).max(initial=1.0), equal_nan=True)

    whole, others = (
        (
            made_up(term.y_true, _ROWS, seed=seed, labels=labels),
            made_up(term.y_pred, _ROWS, seed=seed + 1, low=low, high=high),
        )
        for seed in (0, 2)
    )
    whole, changed = with_changed_rows(whole, others, _CHANGED)
    together, beside_others = values(*whole), values(*changed)
    if together.shape[:1] != (_ROWS,):
        return True
    if not are_alike(together, values(*whole)):
        raise Unknown("the loss is random")
    kept = [row for row in range(_ROWS) if row not in _CHANGED]
    if not are_alike(together[kept], beside_others[kept]):
        return True
    try:
        parts = [values(*some_rows(whole, *rows)) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
    except Exception:
        # As of pairs, if their number is odd.
        return True
    return not are_alike(together, np.concatenate(parts))
