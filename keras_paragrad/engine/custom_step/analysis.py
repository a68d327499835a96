"""Divides a custom `train_step` into phases, by the dependencies of its updates.

An optimizer's update needs the gradients of all slices. Code that reads the updated weights therefore runs in a later
*phase*, after all slices of the code that computed the gradient. Within a phase, no slice reads a weight that the
phase updates.
"""

import sys
from collections import defaultdict
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.custom_step.step_graph import CapturedApply, Sources, StepGraph


class ApplyCall(NamedTuple):
    """A call of `optimizer.apply`, with the indices of the variables that have a gradient, and the gradient's phase."""

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    indices: list[int]
    phase: int


class StateUpdate(NamedTuple):
    """A variable that the step assigns.

    Attributes:
        variable: The variable.
        phase: The first phase in which its new value can be computed.
        by_slice: Whether each slice assigns it, as with metrics, batch statistics and seeds. Others are assigned once,
            after the updates that they depend on, such as an averaged weight or a counter of updates.
        needed: The phases that compute or read it.
    """

    variable: keras.Variable
    phase: int
    by_slice: bool
    needed: frozenset[int]


class LoggedValue(NamedTuple):
    """A value that the step returns.

    Attributes:
        phase: The first phase in which it can be computed.
        by_slice: Whether it is computed from the rows of a slice alone. Others, such as the result of a metric, have
            the whole batch's value in the last slice.
        mixed: Its name, if it is computed from the result of a metric and, beside that, from the rows.
    """

    phase: int
    by_slice: bool
    mixed: str = ""


class WeightChange(NamedTuple):
    """A change of a trainable weight, by an optimizer or an assignment, such as weight clipping, in a phase.

    `position` is the number of operations before it.
    """

    position: int
    phase: int


class StepAnalysis(NamedTuple):
    """The phases of a step, and the values that each one reads and assigns. Variables are keyed by their ids.

    Attributes:
        calls: The calls of optimizers, in order.
        states: The variables that the step assigns, without weights.
        logs: One for each value that the step returns, flat; `None` for what isn't a tensor.
        weights: The weights that the step changes.
        changes: The changes of each weight, in order.
        versions: For each phase, the versions of weights that it reads and an earlier phase has overwritten: pairs of a
            weight and the number of its changes before.
        reads: The variables that each phase reads.
    """

    calls: list[ApplyCall]
    states: list[StateUpdate]
    logs: list[LoggedValue | None]
    weights: dict[int, keras.Variable]
    changes: dict[int, list[WeightChange]]
    versions: list[set[tuple[int, int]]]
    reads: list[set[int]]

    @property
    def phases(self) -> int:
        """The number of phases."""
        return len(self.versions)


def analyze_step(model: keras.Model, data: Batch) -> StepAnalysis:
    """Analyzes a custom `train_step` for slices of these shapes and dtypes; refuses one that can't be divided."""
    return _PhaseAnalysis(StepGraph(model, data)).analyze()


class _PhaseAnalysis:
    """Divides a step into phases. Attributes as in `StepAnalysis`; `changes` includes optimizers' own variables."""

    def __init__(self, step: StepGraph):
        self.step = step
        self.changes: dict[int, list[WeightChange]] = {}
        # The position up to which assignments are among the changes.
        self._added_before = 0

    def analyze(self) -> StepAnalysis:
        """Finds the phase of each value, then all that the phase reads to compute it."""
        step = self.step
        calls = [self._call(call) for call in step.applies]
        self._add_assignments(before=sys.maxsize)
        states = [self._state(key, value) for key, value in step.values.items() if key not in step.weights]
        logs = [self._log(value) for value in step.logs]
        computed: dict[int, list[object]] = defaultdict(list)
        for apply, call in zip(step.applies, calls, strict=True):
            computed[call.phase] += apply.gradients
        for state in states:
            computed[state.phase].append(step.values[id(state.variable)])
        for value, log in zip(step.logs, logs, strict=True):
            if log:
                computed[log.phase].append(value)
        by_slice = {id(state.variable) for state in states if state.by_slice}
        needs = [self._transitive_reads(computed[phase], by_slice) for phase in range(1 + max(computed))]
        versions = [self._overwritten_versions(reads, phase) for phase, (reads, _) in enumerate(needs)]
        states = [
            state._replace(
                needed=frozenset(
                    phase
                    for phase, (_, carried) in enumerate(needs)
                    if phase == state.phase or id(state.variable) in carried
                )
            )
            for state in states
        ]
        return StepAnalysis(
            calls,
            states,
            logs,
            {key: step.variables[key] for key in step.weights},
            self.changes,
            versions,
            [{variable for variable, _ in reads} for reads, _ in needs],
        )

    def _call(self, apply: CapturedApply) -> ApplyCall:
        """Finds the phase of an optimizer call, and adds the call's changes of variables."""
        self._add_assignments(before=apply.position)
        # A phase never precedes an earlier update of the same weights.
        earlier = [change.phase for variable in apply.updated for change in self.changes.get(id(variable), ())]
        phase = max([self._phase_of(self.step.sources(apply.gradients), by_slice=True), *earlier])
        for variable in apply.updated:
            self.changes.setdefault(id(variable), []).append(WeightChange(apply.position, phase))
        return ApplyCall(apply.optimizer, apply.variables, apply.present, phase)

    def _add_assignments(self, *, before: int) -> None:
        """Adds assignments of trainable weights up to a position that aren't among the changes yet."""
        for key in self.step.weights & self.step.assigned_at.keys():
            sources = self.step.sources([self.step.values[key]])
            if sources.by_slice:
                updated = any(id(variable) == key for call in self.step.applies for variable in call.updated)
                advice = (
                    "keras_paragrad.memory.recompute(model) saves memory on whole batches, and DistributedFit trains "
                    "such a step on several devices"
                    if updated
                    else "Set trainable=False on it, as no optimizer updates it"
                )
                raise self.step.refusal(
                    f"assigns {self.step.variables[key].path}, which is trainable, a value that depends on the rows",
                    f", so its batches can't be divided. {advice}",
                )
            changes = self.changes.setdefault(key, [])
            for position in self.step.assigned_at[key]:
                if self._added_before <= position < before:
                    earlier = [change.phase for change in changes if change.position <= position]
                    phase = self._phase_of(sources, by_slice=False, at=position)
                    changes.append(WeightChange(position, max([phase, *earlier])))
            changes.sort()
        self._added_before = before

    def _state(self, key: int, value: object) -> StateUpdate:
        """Finds the phase in which a variable, by its id, is assigned a value; `needed` isn't known yet."""
        sources = self.step.sources([value])
        by_slice = key in self.step.seeds | self.step.metrics or sources.by_slice
        return StateUpdate(self.step.variables[key], self._phase_of(sources, by_slice=by_slice), by_slice, frozenset())

    def _log(self, value: object) -> LoggedValue | None:
        if not isinstance(value, tf.Tensor):
            return None
        sources = self.step.sources([value])
        is_result = any(variable in self.step.metrics for variable, _ in sources.reads)
        results = [state for key, state in self.step.values.items() if key in self.step.metrics]
        # Mixed, if it depends on the rows also where it doesn't depend on a metric's new state.
        is_mixed = is_result and self.step.sources([value], given=results).by_slice
        phase = self._phase_of(sources, by_slice=sources.by_slice)
        return LoggedValue(
            phase, sources.by_slice and not is_result, self.step.log_names.get(id(value), "a value") if is_mixed else ""
        )

    def _phase_of(self, sources: Sources, *, by_slice: bool, at: int = sys.maxsize) -> int:
        """The first phase in which a value can be computed, given the changes before a position."""
        phases = [
            # Only the last slice of a phase may read the phase's updates.
            change.phase + by_slice
            for variable, position in sources.reads
            for change in self.changes.get(variable, ())
            if change.position <= position and change.position < at
        ]
        return max(phases, default=0)

    def _transitive_reads(self, values: list[object], sliced: set[int]) -> tuple[set[tuple[int, int]], set[int]]:
        """The reads that values depend on, directly or through states that earlier slices assign, and these states.

        A read is a variable's `id` and the position in the graph. `sliced` has the ids of states assigned by slice.
        """
        reads, carried, pending = set(), set(), [values]
        while pending:
            new = self.step.sources(pending.pop()).reads
            reads |= new
            for variable in {variable for variable, _ in new} & sliced - carried:
                carried.add(variable)
                pending.append([self.step.values[variable]])
        return reads, carried

    def _overwritten_versions(self, reads: set[tuple[int, int]], phase: int) -> set[tuple[int, int]]:
        """The weight versions that a phase reads after an earlier phase has overwritten them."""
        versions = set()
        for variable, position in reads:
            earlier = [change for change in self.changes.get(variable, ()) if change.phase < phase]
            version = sum(change.position <= position for change in earlier)
            if version < len(earlier):
                if variable not in self.step.weights:
                    raise self.step.refusal(
                        f"computes from {self.step.variables[variable].path}, a variable of an optimizer, both before "
                        "and after an update"
                    )
                versions.add((variable, version))
        return versions
