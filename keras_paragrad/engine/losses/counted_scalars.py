"""Finds on synthetic rows how parts make up a batch's numbers: arguments of `Mean`s and `Sum`s, and returned logs.

A *number* is a scalar for the whole batch, as opposed to values per example. The trial computes it on some rows, and on
two parts of them.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Array, Batch, StepLogs
from keras_paragrad.engine.losses.number_updates import counting_numbers
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.probes.independence import once_per_compile
from keras_paragrad.engine.probes.pure_function import PureFunction
from keras_paragrad.engine.probes.tolerances import NUMBER
from keras_paragrad.engine.probes.trial import SIZES, Inconclusive, run_trial
from keras_paragrad.engine.probes.weighting_trial import BOUNDS, ROWS, compute_parts, over_draws

# Relations between a batch's number and its parts'. NUMBERS: it is their sum. MEANS: it is their mean by rows.
# WEIGHTS, PRODUCTS: its weight, or its product with its weight, is the sum of theirs. BY_ROWS: the parts' weights are
# proportional to their rows.
NUMBERS, MEANS, WEIGHTS, PRODUCTS, BY_ROWS = "numbers", "means", "weights", "products", "by rows"

# The relations that hold for one number.
MadeUpBy = set[str]


class NumberParts(NamedTuple):
    """How parts make up the numbers of a step, in order; `None` for a number that isn't finite.

    Attributes:
        updates: For the numbers that metrics receive.
        logs: For the values that the step returns, flat.
    """

    updates: list[MadeUpBy | None]
    logs: list[MadeUpBy | None]


def is_sum_of_parts(made_up_by: MadeUpBy | None, otherwise: bool) -> bool:
    """Whether a number is the sum of its parts' numbers, and not their mean; `otherwise`, if it is both or neither."""
    if made_up_by is None or (NUMBERS in made_up_by) == (MEANS in made_up_by):
        return otherwise
    return NUMBERS in made_up_by


class _Noted:
    """A `NumberCounter` that records the numbers that metrics receive, each with its weight, and keeps them."""

    def __init__(self):
        self.numbers: list[tf.Tensor] = []
        self._graph = tf.compat.v1.get_default_graph()

    def of_mean(self, value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, Any]:
        self._note(value, 1.0 if weight is None else weight)
        return value, weight

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        self._note(value, 1.0)
        return value

    def _note(self, value: tf.Tensor, weight: Any) -> None:
        pair = tf.stack([tf.cast(value, "float32"), tf.reduce_sum(tf.cast(weight, "float32"))])
        # A tensor of a branch or a loop can't leave it.
        inside = tf.compat.v1.get_default_graph() is not self._graph
        self.numbers.append(tf.fill([2], float("nan")) if inside else pair)


@contextlib.contextmanager
def noting_scalars(model: keras.Model) -> Generator[list[tf.Tensor]]:
    """Context of a trial; yields a list to which each number that a metric receives is added, as `[number, weight]`."""
    noted = _Noted()
    with counting_numbers(model, noted):
        yield noted.numbers


def scalars_of_trial(noted: Sequence[tf.Tensor], logs: StepLogs) -> list[tf.Tensor]:
    """The recorded numbers, and the step's returned values with weights of 1: tensors of shape `(numbers, 2)`."""
    leaves = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(logs)]
    numbers = [tf.reduce_mean(tf.cast(leaf, "float32")) if _is_number(leaf) else tf.zeros([]) for leaf in leaves]
    returned = [tf.stack([number, 1.0]) for number in numbers]
    return [tf.stack(rows) if rows else tf.zeros((0, 2)) for rows in (list(noted), returned)]


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_integer


def compare_scalars(whole: Sequence[Array], parts: Sequence[Sequence[Array]], *, half_precision: bool) -> NumberParts:
    """Finds how parts make up the numbers of a trial, `scalars_of_trial`; inconclusive if their counts differ."""
    tolerance = NUMBER.of(half_precision)
    return NumberParts(
        *(_compare(np.asarray(kind[0]), kind[1:], tolerance) for kind in zip(whole, *parts, strict=True))
    )


def _compare(whole: np.ndarray, parts: Sequence[Array], tolerance: float) -> list[MadeUpBy | None]:
    pieces = [np.asarray(part, "float64") for part in parts]
    if any(piece.shape != whole.shape for piece in pieces):
        raise Inconclusive("the step computes more or fewer numbers on other rows")
    (values, weights), (total, weight) = np.moveaxis(np.stack(pieces), -1, 0), np.asarray(whole, "float64").T
    shares = np.array([[(end - start) / ROWS] for start, end in BOUNDS])

    def close(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
        # Relative to the addends too: if they have both signs, they may cancel.
        return np.abs(found.sum(0) - expected) <= tolerance * np.maximum(np.abs(expected), np.abs(found).sum(0))

    relations = {
        NUMBERS: close(values, total),
        MEANS: close(values * shares, total),
        WEIGHTS: close(weights, weight),
        PRODUCTS: close(values * weights, total * weight),
        BY_ROWS: np.abs(weights - weight * shares).max(0) <= tolerance * np.abs(weight),
    }
    finite: np.ndarray = np.all(np.isfinite(np.stack([whole, *pieces])), axis=(0, 2))
    return [
        {relation for relation, holds in relations.items() if holds[index]} if finite[index] else None
        for index in range(len(whole))
    ]


def in_all_draws(draws: Sequence[NumberParts | None]) -> NumberParts | None:
    """The relations that hold in all conclusive draws; `None` without any, or if draws have more or fewer numbers."""
    known = [draw for draw in draws if draw is not None]
    if not known or len({tuple(map(len, draw)) for draw in known}) > 1:
        return None
    return NumberParts(*([_in_all(number) for number in zip(*kind, strict=True)] for kind in zip(*known, strict=True)))


def _in_all(draws: Sequence[MadeUpBy | None]) -> MadeUpBy | None:
    known = [draw for draw in draws if draw is not None]
    return set.intersection(*known) if known else None


def scalars_of_test_step(model: keras.Model, data: Batch) -> NumberParts | None:
    """Finds how parts make up the numbers of a custom `test_step`; `None` if it can't be tried."""

    def compute(data: Batch) -> list[tf.Tensor]:
        with noting_scalars(model) as noted:
            return scalars_of_trial(noted, model.test_step(data))

    def find(size: int) -> NumberParts | None:
        function = PureFunction(model, compute)

        def compare(rows: Batch) -> NumberParts:
            whole, *parts = compute_parts(function, rows)
            return compare_scalars(whole, parts, half_precision=function.half_precision)

        return in_all_draws(over_draws(model, data, size, compare))

    return once_per_compile(
        ("scalars of test_step",),
        model,
        arguments_of(data),
        lambda: run_trial(find, *SIZES, otherwise=None, question=None),
        by_replicas=False,
    )
