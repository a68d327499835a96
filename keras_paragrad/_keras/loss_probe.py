"""Whether a loss compares the examples of a batch with each other, found by computing it on made-up rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.forward import Weight
from keras_paragrad._keras.losses import LossTerm
from keras_paragrad._keras.made_up import (
    SIZES,
    Unknown,
    attempt,
    called,
    is_coarse,
    made_up,
    some_rows,
    with_changed_rows,
    without_trace,
)

_ROWS = 8
# Whether targets are labels, and between what predictions are: probabilities, logits, embeddings.
_DRAWS = ((True, 0.1, 0.9), (True, -3.0, 3.0), (False, -3.0, 3.0))
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
    with tf.init_scope():
        return any(_loss_mixes(term, one_value_each, *drawn) for drawn in _DRAWS)


def parts_make_up_the_whole(model: Any, arguments: dict[str, Any], weigh: Callable[[dict[str, Any]], Weight]) -> bool:
    """Whether a model's loss, times what it was divided by, is the sum of those of two parts of a batch.

    That is what replicas and micro-batches rely on. For losses that can't be seen into: a `compute_loss` of the
    model's own, and what layers add.

    Args:
        model: A built and compiled model.
        arguments: Those of its `compute_loss`, of which only shapes and dtypes count.
        weigh: From such arguments to what the loss is said to be divided by.

    Returns:
        `True` also where the loss could not be computed on made-up rows.
    """
    with tf.init_scope():
        for size in SIZES:
            with attempt("a loss"):
                x, y, weights = (arguments[name] for name in ("x", "y", "sample_weight"))
                targets = made_up(y, _ROWS, seed=0, size=size, labels=True)
                data = [*made_up((x, weights), _ROWS, seed=1, size=size), targets]
                halves = [some_rows(data, 0, _ROWS // 2), some_rows(data, _ROWS // 2, _ROWS)]
                whole, *pieces = (_undivided(model, rows, weigh) for rows in (data, *halves))
                return bool(np.isclose(whole, sum(pieces), rtol=1e-2 if is_coarse(model) else 1e-3, equal_nan=True))
    return True


def _loss_mixes(term: LossTerm, one_value_each: bool, labels: bool, low: float, high: float) -> bool:
    def values(y_true, y_pred):
        found = np.asarray(LossTerm(term.loss, y_true, y_pred, None).values, "float64")
        # Values of several elements of an example may be flattened with the examples.
        rows = len(keras.tree.flatten(y_pred)[0])
        return found if len(found) % rows or one_value_each else found.reshape(rows, -1)

    def are_alike(one, other):
        return np.allclose(one, other, atol=1e-5 * np.abs(one[np.isfinite(one)]).max(initial=1.0), equal_nan=True)

    with attempt("a loss"):
        whole, others = (
            (
                made_up(term.y_true, _ROWS, seed=seed, labels=labels),
                made_up(term.y_pred, _ROWS, seed=seed + 1, low=low, high=high),
            )
            for seed in (0, 2)
        )
        whole, changed = with_changed_rows(whole, others, _CHANGED)
        together, changed = values(*whole), values(*changed)
        if together.shape[:1] != (_ROWS,):
            return True
        kept = [row for row in range(_ROWS) if row not in _CHANGED]
        if not are_alike(together[kept], changed[kept]):
            return True
        half = _ROWS // 2
        parts = [values(*some_rows(whole, *rows)) for rows in ((0, half), (half, _ROWS))]
        return not are_alike(together, np.concatenate(parts))
    # A loss may well refuse what was made up; then nothing is known of it.
    return False


def _undivided(model: Any, data: list[Any], weigh: Callable[[dict[str, Any]], Weight]) -> float:
    x, sample_weight, y = data
    with without_trace(model):
        arguments = {"x": x, "y": y, "y_pred": called(model, (x,), training=False), "sample_weight": sample_weight}
        loss = model._compute_loss(**arguments, training=True)
        weight = weigh(arguments)
    if loss.shape.rank != 0:
        raise Unknown("the loss is not one number")
    return float(loss) * (1.0 if weight.summed else float(weight.value))
