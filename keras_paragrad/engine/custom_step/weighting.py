"""Finds what the losses of a model's own `train_step` divide by, by a trial on synthetic rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, train_step_of
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis
from keras_paragrad.engine.custom_step.random_rows import random_numbers_by_row
from keras_paragrad.engine.losses.loss_normalization import IndivisibleError
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    gradients_match,
    normalize_by_moving_statistics,
    run_trial,
    synthetic_rows,
    take_rows,
    uses_half_precision,
    value_of,
)
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.replicas.replica_batch import rows_of
from keras_paragrad.engine.step.interception import capturing_applies

_ROWS, _FIRST = 8, 3
_SEEDS = (0, 1)


class Weighting(NamedTuple):
    """What a gradient is divided by.

    Attributes:
        name: `"examples"`, `"sample_weight"` or `"sum"`, or the name of a function.
        divisor: Maps the data of a step to its divisor, a float32 scalar; `None` for a sum.
    """

    name: str
    divisor: Callable[[Any], tf.Tensor] | None

    def share(self, part: Batch, whole: Batch) -> tf.Tensor:
        """The weight of a part's gradient in the whole's."""
        if self.divisor is None:
            return tf.constant(1.0)
        return tf.math.divide_no_nan(self.divisor(part), self.divisor(whole))


def _examples(data: Batch) -> tf.Tensor:
    return tf.cast(rows_of(data), "float32")


def _sample_weight(data: Batch) -> tf.Tensor:
    weight = keras.utils.unpack_x_y_sample_weight(data)[2]
    return _examples(data) if weight is None else tf.reduce_sum(tf.cast(keras.tree.flatten(weight)[0], "float32"))


WEIGHTINGS = {
    each.name: each
    for each in (
        Weighting("examples", _examples),
        Weighting("sample_weight", _sample_weight),
        Weighting("sum", None),
    )
}


class _TrialScope(keras.StatelessScope):
    """Drops assignments of trainable weights, so that a tape can watch them."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if not update[0].trainable:
            super().add_update(update)


class _TrialStep:
    """Computes the gradients of a step on synthetic rows, without side effects.

    Random numbers for the rows of a part are those for the same rows of the whole.
    """

    def __init__(self, model: keras.Model, analysis: StepAnalysis):
        self.model, self.calls = model, analysis.calls
        self.half_precision = uses_half_precision(model)
        self.variables = all_variables(model)
        # Variables, and not tensors: the tape of the step watches what it reads.
        self.values = {id(each): tf.Variable(value_of(each), trainable=each.trainable) for each in self.variables}
        self._functions: dict[tuple[int, int], Callable[[Any], Any]] = {}

    def __call__(self, data: Batch, first: int) -> list[list[np.ndarray]]:
        """The gradients of each call of `apply`, for the rows from `first` on."""
        count = int(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None).shape[0])
        rows = first, count
        if rows not in self._functions:
            self._functions[rows] = tf.function(functools.partial(self._compute, *rows), autograph=False)
        return [[np.asarray(each, "float64") for each in gradients] for gradients in self._functions[rows](data)]

    def _compute(self, first: int, count: int, data: Batch) -> list[list[tf.Tensor]]:
        captured: list[list[tf.Tensor]] = []

        def capture(optimizer: Any, gradients: Gradients, variables: list[keras.Variable]) -> None:
            places = self.calls[len(captured)].places
            present: list[GradientTensor] = [gradients[place] for place in places]  # pyright: ignore
            captured.append([tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in present])

        scope = _TrialScope()
        scope.state_mapping.update(self.values)
        numbers = random_numbers_by_row(first, count, _ROWS)
        with untouched(self.model, scope), capturing_applies(capture), numbers:
            normalize_by_moving_statistics(self.model)
            train_step_of(self.model)(data)
        if len(captured) != len(self.calls):
            raise Inconclusive("the step calls optimizers differently on other rows")
        return captured


class _Misfit(NamedTuple):
    """A gradient that no candidate fits, with the relative error of each."""

    errors: list[float]


def find_weightings(
    model: keras.Model, analysis: StepAnalysis, data: Batch, candidates: Sequence[Weighting]
) -> list[Weighting]:
    """The weighting of each call of an optimizer: the first of some with which parts of a batch give its gradient.

    Args:
        model: A built model with its own `train_step`.
        analysis: What the step does.
        data: Tensors with the shapes and dtypes of a batch.
        candidates: What to try.

    Raises:
        IndivisibleError: None of the candidates fits.
    """

    def find(size: int) -> list[Weighting | _Misfit]:
        step = _TrialStep(model, analysis)
        errors = [_errors_of(step, _draw(data, size, seed), candidates) for seed in _SEEDS]
        return [_first_fitting(each, candidates) for each in zip(*errors, strict=True)]

    results = run_trial(find, *SIZES, otherwise=None, question="what the losses of train_step are divided by")
    if results is None:
        if len(candidates) == 1:
            # As it is stated.
            return [*candidates] * len(analysis.calls)
        raise IndivisibleError(
            f"What the losses in the train_step of {type(model).__name__} are divided by could not be tried on made-up "
            "rows; the log says why. If you know it, state it: weighting='examples' for means over the examples, "
            "'sample_weight' for means weighted by sample weights, or 'sum'."
        )
    misfits = {index: each for index, each in enumerate(results) if isinstance(each, _Misfit)}
    if misfits:
        raise IndivisibleError(_misfit_message(model, analysis.calls, misfits, candidates))
    return [each for each in results if isinstance(each, Weighting)]


# For one draw and one call: the relative error of each candidate, 0 if it fits.
_Errors = list[float]


def _draw(data: Batch, size: int, seed: int) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    rows = functools.partial(synthetic_rows, rows=_ROWS, size=size)
    parts = (rows(x, seed=3 * seed), rows(y, seed=3 * seed + 1, labels=True), rows(sample_weight, seed=3 * seed + 2))
    if not isinstance(data, tuple):
        return parts[0]
    return parts[: len(data)]


def _errors_of(step: _TrialStep, data: Batch, candidates: Sequence[Weighting]) -> list[_Errors]:
    """For each call, the errors of the candidates."""
    bounds = ((0, _FIRST), (_FIRST, _ROWS))
    parts = [take_rows(data, *each) for each in bounds]
    whole = step(data, 0)
    of_parts = [step(part, start) for part, (start, _) in zip(parts, bounds, strict=True)]
    errors = []
    for index, expected in enumerate(whole):
        errors.append([])
        for candidate in candidates:
            shares = [float(candidate.share(part, data)) for part in parts]
            pieces = zip(*(part[index] for part in of_parts), strict=True)
            total = [
                np.sum([float(share) * part for share, part in zip(shares, piece, strict=True)], 0) for piece in pieces
            ]
            matches = gradients_match(expected, total, half_precision=step.half_precision)
            errors[-1].append(0.0 if matches else _relative_error(expected, total))
    return errors


def _relative_error(expected: list[Any], found: list[Any]) -> float:
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(each, "float64"))) for each in expected))
    pairs = zip(expected, found, strict=True)
    error = np.sqrt(sum(np.sum(np.square(np.asarray(a, "float64") - b)) for a, b in pairs))
    return float(error / norm) if norm else float("inf")


def _misfit_message(
    model: keras.Model, calls: Sequence[ApplyCall], misfits: dict[int, _Misfit], candidates: Sequence[Weighting]
) -> str:
    reasons = []
    for index, misfit in misfits.items():
        tried = ", ".join(f"{each.name} {error:.1%} off" for each, error in zip(candidates, misfit.errors, strict=True))
        reasons.append(f"update {index + 1} of {len(calls)}, by {calls[index].optimizer.name!r} ({tried})")
    return (
        f"The train_step of {type(model).__name__} was tried on {_ROWS} made-up rows, and on {_FIRST} and "
        f"{_ROWS - _FIRST} of them. The weighted gradients of the parts don't sum to that of the whole, in "
        f"{'; '.join(reasons)}: its loss compares rows, draws random numbers for a fixed number of rows, or divides by "
        "something else. recompute() saves memory for any loss."
    )


def _first_fitting(errors: Sequence[_Errors], candidates: Sequence[Weighting]) -> Weighting | _Misfit:
    largest = [max(each) for each in zip(*errors, strict=True)]
    return next((each for each, error in zip(candidates, largest, strict=True) if not error), _Misfit(largest))
