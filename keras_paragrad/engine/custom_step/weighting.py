"""Finds what the losses of a model's own `train_step` divide by, by a trial on synthetic rows."""

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, train_step_of
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis, analyze_step
from keras_paragrad.engine.losses.loss_normalization import UNIFORM_NEEDS, IndivisibleError
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting, step_arguments
from keras_paragrad.engine.probes.independence import once_per_compile
from keras_paragrad.engine.probes.random_rows import random_numbers_by_row
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    normalize_by_moving_statistics,
    run_trial,
    take_rows,
    uses_half_precision,
    value_of,
)
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.probes.weighting_trial import (
    BOUNDS,
    FIRST,
    ROWS,
    Fit,
    WeightingTrial,
    errors_of,
    over_draws,
    shares_of,
)
from keras_paragrad.engine.step.interception import capturing_applies

_log = logging.getLogger("keras_paragrad")


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
            indices = self.calls[len(captured)].indices
            present: list[GradientTensor] = [gradients[index] for index in indices]  # pyright: ignore
            captured.append([tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in present])

        scope = _TrialScope(collect_losses=True)
        scope.state_mapping.update(self.values)
        numbers = random_numbers_by_row(first, count, ROWS)
        with untouched(self.model, scope), capturing_applies(capture), numbers:
            normalize_by_moving_statistics(self.model)
            train_step_of(self.model)(data)
        if len(captured) != len(self.calls):
            raise Inconclusive("the step calls optimizers differently on other rows")
        return captured


def find_weightings(
    model: keras.Model, analysis: StepAnalysis, data: Batch, stated: Weighting | None = None
) -> list[Weighting]:
    """The weighting of each call of an optimizer: the first with which parts of a batch give its gradient.

    Args:
        model: A built model with its own `train_step`.
        analysis: What the step does.
        data: Tensors with the shapes and dtypes of a batch.
        stated: The weighting that the user states, if any: no other is taken.

    Raises:
        IndivisibleError: None fits.
    """
    candidates = [each for name, each in WEIGHTINGS.items() if name not in ("sample_weight", "mask")]
    if step_arguments(data)["sample_weight"] is not None:
        candidates.insert(1, WEIGHTINGS["sample_weight"])
    if stated is not None:
        candidates = [stated, *(each for each in candidates if each is not stated)]

    def find(size: int) -> list[WeightingTrial]:
        step, given = _TrialStep(model, analysis), data if isinstance(data, tuple) else (data,)

        def compare(batch: Any) -> list[list[float]]:
            return _errors_of(step, batch if isinstance(data, tuple) else batch[0], candidates)

        errors = over_draws(model, given, size, compare)
        # For each call, the errors of the candidates in all draws.
        by_call = ([max(each) for each in zip(*of_draws, strict=True)] for of_draws in zip(*errors, strict=True))
        return [WeightingTrial(list(map(Fit, candidates, each))) for each in by_call]

    trials = run_trial(find, *SIZES, otherwise=None, question="what the losses of train_step are divided by")
    if trials is None:
        if stated is not None:
            return [stated] * len(analysis.calls)
        raise IndivisibleError(
            f"What the losses in the train_step of {type(model).__name__} are divided by could not be tried on made-up "
            "rows; the log says why. If you know it, state it: weighting='examples' for means over the examples, "
            "'sample_weight' for means weighted by sample weights, 'sum', or a function of (x, y, y_pred, "
            "sample_weight), where y_pred is None."
        )
    taken = [[each for each in trial.fitting if stated in (None, each)] for trial in trials]
    misfits = {index: trial for index, trial in enumerate(trials) if not taken[index]}
    if misfits:
        raise IndivisibleError(_misfit_message(model, analysis.calls, misfits, stated))
    return [fitting[0] for fitting in taken]


def sums_in_step(model: keras.Model, data: Batch) -> list[bool]:
    """For each call of an optimizer, whether its loss is a sum over the rows; empty if that can't be found."""

    def find() -> list[bool]:
        try:
            weightings = find_weightings(model, analyze_step(model, data), data)
        except Exception:
            # What trains inexactly may be anything.
            _log.debug("What the losses of a step divide by was not found.", exc_info=True)
            return []
        return [each.divisor is None for each in weightings]

    return once_per_compile(("sums in train_step",), model, step_arguments(data), find)


def warn_of_uniform_step(model: keras.Model, data: Batch) -> None:
    """Warns, once for each `compile`, of a step that isn't a mean over the examples, or does more once an update."""

    def find() -> str | None:
        try:
            analysis = analyze_step(model, data)
            weightings = find_weightings(model, analysis, data)
        except IndivisibleError as refusal:
            return str(refusal)
        except Exception:
            _log.debug("A train_step with weighting='uniform' was not checked.", exc_info=True)
            return None
        reasons = []
        if len(analysis.calls) > 1:
            reasons.append(f"updates weights {len(analysis.calls)} times")
        if any(not state.by_slice for state in analysis.states):
            reasons.append("changes states once an update, which happens once a micro-batch then")
        others = dict.fromkeys(each.argument for each in weightings if each is not WEIGHTINGS["examples"])
        if others:
            reasons.append(f"has losses that are weighted by {', '.join(others)}")
        return f"The train_step of {type(model).__name__} {', and '.join(reasons)}." if reasons else None

    if found := once_per_compile(("uniform step",), model, step_arguments(data), find):
        warnings.warn(f"{UNIFORM_NEEDS} {found} Leave weighting out.", stacklevel=2)


def _errors_of(step: _TrialStep, data: Batch, candidates: Sequence[Weighting]) -> list[list[float]]:
    """For each call, the errors of the candidates."""
    parts = [take_rows(data, *each) for each in BOUNDS]
    whole = step(data, 0)
    of_parts = [step(part, start) for part, (start, _) in zip(parts, BOUNDS, strict=True)]

    def divisors(rows: Batch) -> list[Any]:
        return [each.divisor(step_arguments(rows)) if each.divisor else 0.0 for each in candidates]

    shares = shares_of([divisors(part) for part in parts], divisors(data))
    return [
        errors_of(expected, [part[index] for part in of_parts], shares, half_precision=step.half_precision)
        for index, expected in enumerate(whole)
    ]


def _misfit_message(
    model: keras.Model, calls: Sequence[ApplyCall], misfits: dict[int, WeightingTrial], stated: Weighting | None
) -> str:
    reasons = [
        f"update {index + 1} of {len(calls)}, by {calls[index].optimizer.name!r} ({trial})"
        for index, trial in misfits.items()
    ]
    seen = (
        f"The train_step of {type(model).__name__} was tried on {ROWS} made-up rows, and on {FIRST} and "
        f"{ROWS - FIRST} of them. The weighted gradients of the parts don't sum to that of the whole, in "
        f"{'; '.join(reasons)}"
    )
    if stated is not None and all(trial.fitting for trial in misfits.values()):
        return f"{seen}. Leave weighting={stated.argument} out, and each update is weighted by what fits it."
    return (
        f"{seen}: its loss compares rows, draws random numbers for a fixed number of rows, or divides by something "
        "else, such as a count of tokens. What that is, a function can say: weighting=lambda x, y, y_pred, "
        "sample_weight: keras.ops.sum(y != 0), for instance, where y_pred is None. recompute() saves memory for any "
        "loss."
    )
