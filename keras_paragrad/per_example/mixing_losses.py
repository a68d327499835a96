"""Finds, by a trial on synthetic rows, whether a loss compares the examples of a batch with each other."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.losses.known_classes import has_value_per_example
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.tracing.effects import assigned_resources
from keras_paragrad.engine.trials.made_up_rows import synthetic_rows
from keras_paragrad.engine.trials.trial import LOSS, Inconclusive, run_trial, take_rows
from keras_paragrad.per_example.mixing_layers import change_rows, check_finite

_ROWS = 8
# The size of the first of two parts of different sizes.
_FIRST = 3
# Whether targets are labels, and the range of predictions: probabilities, logits and embeddings.
_DRAWS = ((True, 0.1, 0.9), (True, -3.0, 3.0), (False, -3.0, 3.0))
# Changed rows lie before, between and after the compared ones, to find losses of neighbouring pairs.
_CHANGED = [0, 3]
# What a loss does, as clauses of an error.
COMPARES = "compares examples: its value for one depends on the others in the batch, or on how many there are"
ASSIGNS = "assigns variables, which each part of a batch would change in turn"


class _AssignsError(Exception):
    """The loss assigns variables."""


def find_mixing(term: LossTerm, *, one_value_each: bool = False) -> str | None:
    """Why parts of a batch don't give a loss's values for its examples: `COMPARES`, `ASSIGNS`, or `None`.

    Tries the loss on synthetic rows with the shapes of the term's targets and predictions. Also `None` if it can't be
    called on these, or returns a scalar. If `one_value_each`, a loss that flattens examples and their elements into one
    axis counts as mixing.
    """
    traced = tf.function(lambda y_true, y_pred: LossTerm(term.loss, y_true, y_pred, None).values, autograph=False)

    def compute(y_true: Structure, y_pred: Structure) -> tf.Tensor:
        # A scope takes what is assigned to Keras's variables.
        with keras.StatelessScope() as scope:
            graph = traced.get_concrete_function(y_true, y_pred).graph
        if scope.state_mapping or assigned_resources(graph):
            raise _AssignsError
        return traced(y_true, y_pred)

    def find(draws: tuple[tuple[bool, float, float], ...]) -> str | None:
        if has_value_per_example(term.loss):
            return None
        answers, failures = [], []
        for draw in draws:
            try:
                answers.append(_mixes(term, compute, one_value_each, *draw))
            except _AssignsError:
                return ASSIGNS
            except Exception as error:
                # A loss for embeddings may reject labels, and a loss for probabilities may reject logits.
                failures.append(error)
        if not answers:
            raise failures[0]
        return COMPARES if any(answers) else None

    # One choice: all draws.
    return run_trial(find, _DRAWS, otherwise=None, question=f"whether the loss {term.loss.name!r} compares examples")


def _mixes(
    term: LossTerm, compute: Callable[..., tf.Tensor], one_value_each: bool, labels: bool, low: float, high: float
) -> bool:
    """Whether the losses of some rows, as `compute` returns them, change with other rows or when the batch is split."""

    def values(y_true: Structure, y_pred: Structure) -> np.ndarray:
        losses = np.asarray(compute(y_true, y_pred), "float64")
        # The loss may flatten the elements of an example into the axis of examples.
        rows = len(keras.tree.flatten(y_pred)[0])
        return losses if not losses.ndim or len(losses) % rows or one_value_each else losses.reshape(rows, -1)

    def match(one: np.ndarray, other: np.ndarray) -> bool:
        return np.allclose(one, other, atol=LOSS * np.abs(one[np.isfinite(one)]).max(initial=1.0), equal_nan=True)

    def draw(seed: int) -> tuple[Any, Any]:
        y_true = synthetic_rows(term.y_true, _ROWS, seed=seed, labels=labels)
        return y_true, synthetic_rows(term.y_pred, _ROWS, seed=seed + 1, low=low, high=high)

    whole, changed = change_rows(draw(0), draw(2), _CHANGED)
    before, after = values(*whole), values(*changed)
    if not before.ndim:
        return False
    if before.shape[:1] != (_ROWS,):
        return True
    if not match(before, values(*whole)):
        raise Inconclusive("the loss is random")
    unchanged = [row for row in range(_ROWS) if row not in _CHANGED]
    check_finite([before[unchanged]], "the losses")
    if not match(before[unchanged], after[unchanged]):
        return True
    try:
        parts = [values(*take_rows(whole, *rows)) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
    except Exception:
        # For example a loss of pairs, called with an odd number of rows.
        return True
    return not match(before, np.concatenate(parts))
