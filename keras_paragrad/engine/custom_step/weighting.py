"""Finds, by a trial on synthetic rows, the divisors of the losses in a custom `train_step`."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.model import all_layers, all_variables, step_metrics, train_step_of
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis, analyze_step
from keras_paragrad.engine.custom_step.versions import gather_remote_values
from keras_paragrad.engine.division.dividers import Divider
from keras_paragrad.engine.losses.counted_scalars import (
    NumberParts,
    compare_scalars,
    in_all_draws,
    noting_scalars,
    scalars_of_trial,
)
from keras_paragrad.engine.losses.loss_normalization import UNIFORM_NEEDS
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting
from keras_paragrad.engine.probes.independence import once_per_compile, states_refusal
from keras_paragrad.engine.probes.pure_function import PureFunction, State, is_seed, value_of
from keras_paragrad.engine.probes.states import RANGES, BatchSplit, split_dependent_states
from keras_paragrad.engine.probes.trial import SIZES, Inconclusive, run_trial, synthetic_rows, take_rows
from keras_paragrad.engine.probes.weighting_trial import (
    BOUNDS,
    FIRST,
    ROWS,
    WeightingTrial,
    compute_parts,
    errors_of,
    fits_in_all_draws,
    over_draws,
    part_weights,
)
from keras_paragrad.engine.step.interception import capturing_applies

_log = logging.getLogger("keras_paragrad")


class _TrialScope(keras.StatelessScope):
    """A scope that drops assignments of trainable weights, so that a tape can watch them."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if not update[0].trainable:
            super().add_update(update)


class TrialStep(PureFunction):
    """The gradients of a step for each optimizer call, as a pure function of rows and of all variables but weights.

    `remote` has the values of variables that can't be read here, by their ids; `rows` is the number of rows of the
    whole batch.
    """

    def __init__(
        self, model: keras.Model, calls: Sequence[ApplyCall], remote: Mapping[int, tf.Tensor], rows: int = ROWS
    ):
        self.calls = calls
        values = [
            (variable, remote[id(variable)] if id(variable) in remote else value_of(variable))
            for variable in all_variables(model)
        ]
        # Variables, not tensors: the tape of the step watches reads of variables.
        self._weights = {id(variable): tf.Variable(value) for variable, value in values if variable.trainable}
        super().__init__(
            model, self._gradients_by_call, total=rows, values=[pair for pair in values if not pair[0].trainable]
        )

    def scope(self, state: State) -> keras.StatelessScope:
        """The scope of a trial, in which the step may also read variables outside of the model."""
        scope = _TrialScope(list(zip(self.variables, state, strict=True)), collect_losses=True)
        scope.state_mapping.update(self._weights)
        return scope

    def check(self, traced: Any) -> None:
        """Checks nothing: the analysis of the step has checked the reads."""

    def _gradients_by_call(self, data: Batch) -> list[list[tf.Tensor]]:
        """Runs the step with its optimizer calls captured, not applied.

        Returns the float32 gradients of each call, without those that are `None`; then the results of `run_step`.
        """
        captured: list[list[tf.Tensor]] = []

        def capture(optimizer: Any, gradients: Gradients, variables: list[keras.Variable]) -> None:
            if len(captured) == len(self.calls):
                raise Inconclusive("the step calls optimizers more often on other rows")
            indices = self.calls[len(captured)].indices
            present: list[GradientTensor] = [gradients[index] for index in indices]  # pyright: ignore
            captured.append([tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in present])

        with capturing_applies(capture):
            results = self.run_step(data)
        if len(captured) != len(self.calls):
            raise Inconclusive("the step calls optimizers differently on other rows")
        return [*captured, *results]

    def run_step(self, data: Batch) -> list[list[tf.Tensor]]:
        """Runs the step; returns the results to append to the gradients."""
        train_step_of(self.model)(data)
        return []


class _ScalarTrial(TrialStep):
    """Appends the numbers that the step passes to metrics, and its logs, to the gradients."""

    def run_step(self, data: Batch) -> list[list[tf.Tensor]]:
        with noting_scalars(self.model) as noted:
            return [scalars_of_trial(noted, train_step_of(self.model)(data))]


def _dependent_states(step: TrialStep, analysis: StepAnalysis, rows: Batch, split: BatchSplit) -> list[str]:
    """States assigned per slice that no reduction combines, and that depend on how rows are split."""
    model, positions = step.model, {id(variable): index for index, variable in enumerate(step.variables)}
    normalizations = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    combined = {id(variable) for metric in (*step_metrics(model), *normalizations) for variable in metric.variables}
    assigned = [state.variable for state in analysis.states if state.by_slice and not is_seed(state.variable)]
    states = [state for state in assigned if id(state) in positions.keys() - combined]
    indices = [positions[id(state)] for state in states]

    def run(rows: Batch, values: State, first: int) -> tuple[Any, State]:
        given = dict(zip(indices, values, strict=True))
        state = [given.get(index, value) for index, value in enumerate(step.start)]
        results, after = step(rows, state, first)
        return results[: len(step.calls)], [after[index] for index in indices]

    start = [step.start[index] for index in indices]
    return [state.path for state in split_dependent_states(states, run, start, rows, split)] if states else []


class _StepTrial(NamedTuple):
    """The trial of each optimizer call, the reduction of each number, and the states that depend on the split."""

    trials: list[WeightingTrial]
    scalars: NumberParts | None
    dependent: list[str]


def find_step_weightings(
    model: keras.Model,
    analysis: StepAnalysis,
    data: Batch,
    stated: Weighting | None = None,
    divider: Divider | None = None,
) -> tuple[list[Weighting], NumberParts | None]:
    """Finds the weighting of each optimizer call, and the reduction of the step's numbers, if they could be tried.

    The weighting is the first candidate with which parts of a batch give the call's gradient. If one is `stated`, it is
    the only candidate. `divider` is what splits the batch; `None` if nothing does.

    Raises:
        IndivisibleError: No candidate fits, or parts of a batch end in other states than the whole.
    """
    candidates = [weighting for name, weighting in WEIGHTINGS.items() if name not in ("sample_weight", "mask")]
    remote = gather_remote_values(model)
    if arguments_of(data)["sample_weight"] is not None:
        candidates.insert(1, WEIGHTINGS["sample_weight"])
    if stated is not None:
        candidates = [stated, *(candidate for candidate in candidates if candidate is not stated)]

    split = BatchSplit(replica_count() > 1, divider is None or divider.in_sequence, ROWS, FIRST)

    def find(size: int) -> _StepTrial:
        step = _ScalarTrial(model, analysis.calls, remote)
        compared = over_draws(model, data, size, lambda batch: _compare(step, batch, candidates))
        errors, scalars = zip(*compared, strict=True)
        trials = [WeightingTrial(fits_in_all_draws(candidates, of_call)) for of_call in zip(*errors, strict=True)]
        dependent: list[str] = []
        for seed, (low, high) in enumerate(RANGES if divider else ()):
            rows = synthetic_rows(data, ROWS, seed=seed, size=size, low=low, high=high)
            dependent += _dependent_states(step, analysis, rows, split)
        return _StepTrial(trials, in_all_draws(scalars), list(dict.fromkeys(dependent)))

    result = run_trial(find, *SIZES, otherwise=None, question="what the losses of train_step are divided by")
    if result is None:
        if stated is not None:
            return [stated] * len(analysis.calls), None
        raise IndivisibleError(
            f"What the losses in the train_step of {type(model).__name__} are divided by could not be tried on made-up "
            "rows; the log says why. If you know it, state it: weighting='examples' for means over the examples, "
            "'sample_weight' for means weighted by sample weights, 'sum', or a function of (x, y, y_pred, "
            "sample_weight), where y_pred is None."
        )
    if result.dependent and divider:
        message = states_refusal(result.dependent, divider)
        if stated is None:
            raise IndivisibleError(message)
        warn_once(model, message)
    usable = [[weighting for weighting in trial.fitting if stated in (None, weighting)] for trial in result.trials]
    misfits = {index: trial for index, trial in enumerate(result.trials) if not usable[index]}
    if misfits:
        raise IndivisibleError(_misfit_message(model, analysis.calls, misfits, stated))
    return [weightings[0] for weightings in usable], result.scalars


def sums_in_step(model: keras.Model, data: Batch) -> tuple[list[bool], NumberParts | None]:
    """For each optimizer call, whether its loss is a sum over the rows; and the reduction of the step's numbers.

    Empty and `None` if that can't be found.
    """

    def find() -> tuple[list[bool], NumberParts | None]:
        try:
            weightings, scalars = find_step_weightings(model, analyze_step(model, data), data)
        except Exception:
            # Steps that are trained inexactly may do anything.
            _log.debug("What the losses of a step divide by was not found.", exc_info=True)
            return [], None
        return [weighting.divisor is None for weighting in weightings], scalars

    return once_per_compile(("sums in train_step",), model, arguments_of(data), find)


def warn_of_uniform_step(model: keras.Model, data: Batch) -> None:
    """Warns, once for each `compile`, of a step with a non-mean loss or with per-update side effects."""

    def find() -> str | None:
        try:
            analysis = analyze_step(model, data)
            weightings, _ = find_step_weightings(model, analysis, data)
        except IndivisibleError as refusal:
            return str(refusal)
        except Exception:
            _log.debug("A train_step with weighting='uniform' was not checked.", exc_info=True)
            return None
        reasons = []
        if len(analysis.calls) > 1:
            reasons.append(f"updates weights {len(analysis.calls)} times")
        if any(not state.by_slice for state in analysis.states):
            reasons.append("changes states once per update, which then happens once per micro-batch")
        others = dict.fromkeys(
            weighting.argument for weighting in weightings if weighting is not WEIGHTINGS["examples"]
        )
        if others:
            reasons.append(f"has losses that are weighted by {', '.join(others)}")
        return f"The train_step of {type(model).__name__} {', and '.join(reasons)}." if reasons else None

    if found := once_per_compile(("uniform step",), model, arguments_of(data), find):
        warn_once(model, f"{UNIFORM_NEEDS} {found} Leave weighting out.")


def _compare(
    step: TrialStep, data: Batch, candidates: Sequence[Weighting]
) -> tuple[list[list[float]], NumberParts | None]:
    """For each call, the errors of the candidates; and the reduction of the step's numbers, or `None` if unknown."""
    whole, *of_parts = results = compute_parts(step, data)
    arguments = [arguments_of(take_rows(data, *rows)) for rows in ((0, ROWS), *BOUNDS)]
    shares = part_weights([[candidate.value(rows) for candidate in candidates] for rows in arguments])
    errors = [
        errors_of([result[index] for result in results], shares, half_precision=step.half_precision)
        for index in range(len(step.calls))
    ]
    scalars = None
    with contextlib.suppress(Inconclusive):
        scalars = compare_scalars(whole[-1], [results[-1] for results in of_parts], half_precision=step.half_precision)
    return errors, scalars


def _misfit_message(
    model: keras.Model, calls: Sequence[ApplyCall], misfits: dict[int, WeightingTrial], stated: Weighting | None
) -> str:
    reasons = [
        f"update {index + 1} of {len(calls)}, by {calls[index].optimizer.name!r} ({trial})"
        for index, trial in misfits.items()
    ]
    seen = (
        f"The train_step of {type(model).__name__} was tried on {ROWS} made-up rows, and on {FIRST} and "
        f"{ROWS - FIRST} of them. The weighted gradients of the parts don't sum to the whole's, in "
        f"{'; '.join(reasons)}"
    )
    if stated is not None and all(trial.fitting for trial in misfits.values()):
        return f"{seen}. Leave weighting={stated.argument} out, and each update is weighted by what fits it."
    return (
        f"{seen}: its loss compares rows, draws random numbers for a fixed number of rows, or divides by something "
        "else, such as a count of tokens. State that as a function: weighting=lambda x, y, y_pred, "
        "sample_weight: keras.ops.sum(y != 0), for instance, where y_pred is None. recompute() saves memory for any "
        "loss."
    )
