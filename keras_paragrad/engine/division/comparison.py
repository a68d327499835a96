"""Compares the parts' gradients with the whole batch's, and distinguishes errors from rounding and randomness.

The *whole* is rows of the first batch; its parts are cut from it. A gradient is a list with an array for each weight.
"""

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import percent
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.probes.pure_function import PureFunction
from keras_paragrad.engine.probes.tolerances import GRADIENT, TIMES_NOISE
from keras_paragrad.engine.probes.trial import relative_error, take_rows

_LAST_DIGITS = 1e-6


class Difference(NamedTuple):
    """The error of the weighted gradients of `parts` of `rows` rows, against the gradient of the whole.

    `error` is the norm of the difference over the norm of the gradient; `call` is the index of the optimizer call that
    gets the gradient.
    """

    error: float
    rows: int
    parts: int
    call: int = 0

    def __str__(self) -> str:
        return (
            f"On {self.rows} rows of the first batch, the weighted gradients of {self.parts} parts are "
            f"{percent(self.error)} off the gradient of the whole"
        )


class WeightedGradient(NamedTuple):
    """The gradient of some rows, an array for each weight, and the divisor of their loss: 0 for a sum."""

    gradient: list[np.ndarray]
    divisor: float


class PartComparison(abc.ABC):
    """Compares the weighted gradients of parts of a batch with the gradients of the whole.

    Attributes:
        function: Computes the gradients of rows.
    """

    function: PureFunction

    @abc.abstractmethod
    def run(self, rows: Batch, first: int, *, changed: bool = False) -> list[WeightedGradient]:
        """For each call of an optimizer, the gradient of the rows from `first` on.

        If `changed`, perturbs inputs and weights in the last digits, and draws other random numbers.
        """

    def compare(self, data: Batch, cut: RowCut) -> Difference | None:
        """The first difference between the parts and the whole that noise doesn't explain, or `None`."""
        rows = self.prepare(cut.take(data), cut)
        if rows is None:
            return None
        # Computed once, and only if a difference has to be explained.
        changed = functools.cache(lambda: list(self._changed(rows)))
        for call, (whole, total) in enumerate(self.gradients(rows, cut)):
            error = _unexplained_error(
                whole,
                total,
                lambda call=call: (gradients[call] for gradients in changed()),
                self.function.half_precision,
            )
            if error:
                return Difference(error, len(cut.rows), len(cut.bounds), call)
        return None

    def gradients(self, rows: Batch, cut: RowCut) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        """For each optimizer call, the gradient of the whole, and the weighted sum of the parts' gradients."""
        wholes = self.run(rows, 0)
        totals = [[np.zeros_like(gradient) for gradient in whole.gradient] for whole in wholes]
        divisors = np.zeros(len(wholes))
        for start, stop in cut.bounds:
            parts = self.run(take_rows(rows, start, stop), start)
            for total, part in zip(totals, parts, strict=True):
                self.add(total, part.gradient, part.divisor or 1.0, start, stop)
            divisors += [part.divisor for part in parts]
        return [
            (whole.gradient, [sums / (divisor or 1.0) for sums in total])
            for whole, total, divisor in zip(wholes, totals, divisors, strict=True)
        ]

    def prepare(self, rows: Batch, cut: RowCut) -> Batch | None:
        """The data for `run`, from the whole's rows; `None` if it can't be made."""
        return rows

    def add(self, total: list[np.ndarray], gradient: list[np.ndarray], weight: float, start: int, stop: int) -> None:
        """Adds the gradient of the part with the rows `start` to `stop`, times its weight, to the total."""
        for sums, part in zip(total, gradient, strict=True):
            sums += weight * part

    def _changed(self, rows: Batch) -> Iterable[list[list[np.ndarray]]]:
        """The whole's gradients for each optimizer call, after changes that affect only rounding and random numbers."""
        yield [call.gradient for call in self.run(rows, 0, changed=True)]
        if not self.function.draws:
            # In another order, rows would draw other random numbers.
            yield self.reordered(rows)

    def reordered(self, rows: Batch) -> list[list[np.ndarray]]:
        """The gradients of the same rows in another order."""
        return [call.gradient for call in self.run(reverse_rows(rows), 0)]


def _unexplained_error(
    whole: list[np.ndarray],
    total: list[np.ndarray],
    changed: Callable[[], Iterable[list[np.ndarray]]],
    half_precision: bool,
) -> float:
    """The relative error of the parts' summed gradients, `total`; 0 if it is within the noise of the `changed` ones."""
    error = relative_error(whole, total)
    if error is None or error <= GRADIENT.of(half_precision):
        return 0.0
    noise = max((relative_error(whole, other) or 0.0 for other in changed()), default=0.0)
    return 0.0 if error <= TIMES_NOISE * noise else error


def perturb(nested: Any) -> Any:
    """Perturbs the real numbers of nested tensors in the last digits of float32."""

    def change(value: Any) -> Any:
        return (
            value * tf.cast(1 + _LAST_DIGITS, value.dtype) if value is not None and value.dtype.is_floating else value
        )

    return keras.tree.map_structure(change, nested)


def reverse_rows(nested: Structure) -> Structure:
    """Reverses the rows of nested tensors."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.reverse(leaf, [0]), nested)
