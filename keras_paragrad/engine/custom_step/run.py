"""Runs a custom `train_step` in slices, phase by phase, with one update for each call of an optimizer.

An optimizer call whose gradients depend on weights that an earlier call has updated, as in a GAN, needs a pass over all
slices after that update. So calls are grouped into phases. Each phase runs the whole step on every slice, sums the
gradients of its own calls only, and updates by them in its last slice.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, train_step_of
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor, StepLogs
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis
from keras_paragrad.engine.custom_step.versions import PhaseScope, WeightVersions
from keras_paragrad.engine.losses.counted_scalars import NumberParts, is_sum_of_parts
from keras_paragrad.engine.losses.number_updates import counting_numbers
from keras_paragrad.engine.losses.part_numbers import SliceNumbers
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.step.stages import BatchSlices
from keras_paragrad.storage.gathering import gather_before_loop
from keras_paragrad.storage.row_gradients import accumulate_gradient, sum_dtype

# Updates variables: gets an optimizer call, and the gradients of the whole batch.
Update = Callable[[ApplyCall, Gradients], None]
# The weight of some rows in the batch, under a weighting.
Share = Callable[[Weighting, Batch], tf.Tensor]


class SlicedStep(NamedTuple):
    """Runs the phases of one step.

    Attributes:
        model: The model.
        analysis: What its step does.
        versions: The values of weights from before updates, for later phases that read them.
        weightings: What the gradient of each call is divided by.
        share: The weight of a slice in the batch.
        update: Updates variables.
        scalars: What makes up the numbers that the step reports.
        summed: Whether numbers whose reduction is unknown are sums over rows, rather than means.
    """

    model: keras.Model
    analysis: StepAnalysis
    versions: WeightVersions
    weightings: Sequence[Weighting]
    share: Share
    update: Update
    scalars: NumberParts | None
    summed: bool

    def run(
        self,
        slices: BatchSlices,
        at_end: Callable[[], AbstractContextManager[object]] = nullcontext,
        nonempty: tf.Tensor | None = None,
    ) -> StepLogs:
        """Runs all phases, and returns the logs.

        `at_end` returns the context for the last slice of each phase. If `nonempty` is false, all rows are filler, and
        no state changes.
        """
        values: dict[int, tf.Tensor] = {}
        flat: dict[int, tf.Tensor] = {}
        logs: StepLogs = {}
        for number in range(self.analysis.phases):
            phase = _Phase(self, number)
            scope, logs, averaged = phase.run(slices, at_end)
            values |= phase.new_values(scope)
            flat |= phase.own_logs(logs, averaged)
        for state in self.analysis.states:
            value = values.get(id(state.variable))
            if value is not None:
                if state.by_slice and nonempty is not None:
                    value = tf.where(nonempty, value, state.variable.value)
                state.variable.assign(value)
        leaves = [flat.get(index, leaf) for index, leaf in enumerate(keras.tree.flatten(logs))]
        return keras.tree.pack_sequence_as(logs, leaves)


def changed_calls_error(model: keras.Model) -> RuntimeError:
    """The error for a step whose optimizer calls differ from the analyzed ones."""
    return RuntimeError(
        f"The train_step of {type(model).__name__} calls its optimizers differently each time it is traced, so its "
        "batches can't be divided. Let it call the same ones in the same order."
    )


def next_call(model: keras.Model, calls: Iterator[ApplyCall], optimizer: keras.optimizers.Optimizer) -> ApplyCall:
    """The analyzed call that corresponds to a traced optimizer call."""
    call = next(calls, None)
    if call is None or call.optimizer is not optimizer:
        raise changed_calls_error(model)
    return call


class _Sums(NamedTuple):
    """The values that a phase carries from slice to slice: its calls' weighted gradients, states, averaged logs."""

    gradients: list[list[tf.Tensor]]
    states: list[tf.Tensor]
    logs: list[tf.Tensor]


class _Phase:
    """One pass over the slices, which makes some of the optimizer calls of the step."""

    def __init__(self, step: SlicedStep, phase: int):
        self.step, self.phase, self.model, analysis = step, phase, step.model, step.analysis
        # Indices of this phase's calls and logs.
        self.calls = [index for index, call in enumerate(analysis.calls) if call.phase == phase]
        self.logs = [index for index, log in enumerate(analysis.logs) if log and log.phase == phase]
        self.averaged = [index for index in self.logs if (log := analysis.logs[index]) and log.by_slice]
        self.carried = [state.variable for state in analysis.states if state.by_slice and phase in state.needed]

    def run(
        self, slices: BatchSlices, at_end: Callable[[], AbstractContextManager[object]]
    ) -> tuple[PhaseScope, StepLogs, list[tf.Tensor]]:
        """Sums gradients over slices, and updates in the last one; returns its scope, its logs and averaged logs."""
        sums = self._start()
        if not (isinstance(slices.number, int) and slices.number == 0):
            with self._gathered():
                sums = tf.while_loop(
                    lambda index, _: index < slices.number,
                    lambda index, sums: (index + 1, self._add(sums, slices.at(index))),
                    (tf.constant(0), sums),
                    parallel_iterations=1,
                )[1]
        with at_end():
            return self._finish(sums, slices.last)

    def _gathered(self) -> AbstractContextManager[None]:
        """Context in which sharded weights are gathered before the loop, where no collective can run."""
        versions = self.step.versions.read_in(self.phase)
        needed = {*self.step.analysis.reads[self.phase], *map(id, versions)}
        return gather_before_loop([*all_variables(self.model), *versions], needed)

    def new_values(self, scope: PhaseScope) -> dict[int, tf.Tensor]:
        """The new values of states that this phase computes, after its last slice."""
        computed = [state.variable for state in self.step.analysis.states if state.phase == self.phase]
        values = {id(variable): scope.get_current_value(variable) for variable in computed}
        return {key: value for key, value in values.items() if value is not None}

    def own_logs(self, logs: StepLogs, averaged: list[tf.Tensor]) -> dict[int, tf.Tensor]:
        """The logs that this phase computes, by index."""
        flat = keras.tree.flatten(logs)
        return {**{index: flat[index] for index in self.logs}, **dict(zip(self.averaged, averaged, strict=True))}

    def _start(self) -> _Sums:
        """The values before the first slice: sums of zeros, and the states."""
        calls = [self.step.analysis.calls[index] for index in self.calls]
        variables = [[call.variables[index] for index in call.indices] for call in calls]
        gradients = [[tf.zeros(variable.shape, sum_dtype(variable)) for variable in group] for group in variables]
        states = [tf.convert_to_tensor(variable.value) for variable in self.carried]
        return _Sums(gradients, states, [tf.constant(0.0) for _ in self.averaged])

    def _add(self, sums: _Sums, rows: Batch) -> _Sums:
        """Adds a slice other than the last, without an update."""
        captured: dict[int, Gradients] = {}
        scope, logs = self._run_slice(sums, rows, captured.__setitem__)
        pairs = zip(self.calls, sums.gradients, strict=True)
        gradients = [self._accumulate(index, total, captured[index], rows) for index, total in pairs]
        return _Sums(
            gradients, [scope.value_of(variable) for variable in self.carried], self._add_logs(sums.logs, logs, rows)
        )

    def _finish(self, sums: _Sums, rows: Batch) -> tuple[PhaseScope, StepLogs, list[tf.Tensor]]:
        """Runs the last slice, in which the step's optimizer calls update variables."""
        totals = dict(zip(self.calls, sums.gradients, strict=True))

        def update(index: int, gradients: Gradients) -> None:
            if index in totals:
                call = self.step.analysis.calls[index]
                total = dict(zip(call.indices, self._accumulate(index, totals[index], gradients, rows), strict=True))
                self.step.update(
                    call,
                    [
                        tf.cast(total[number], variable.dtype) if number in total else None
                        for number, variable in enumerate(call.variables)
                    ],
                )

        scope, logs = self._run_slice(sums, rows, update, last=True)
        return scope, logs, self._add_logs(sums.logs, logs, rows)

    def _run_slice(
        self, sums: _Sums, rows: Batch, on_apply: Callable[[int, Gradients], object], *, last: bool = False
    ) -> tuple[PhaseScope, StepLogs]:
        """Runs the step on a slice; returns its scope, which holds the assigned states, and its logs.

        Args:
            sums: The values carried so far; the step reads their states.
            rows: The slice.
            on_apply: Called in place of each optimizer call of this phase, with its index and its gradients.
            last: Whether this is the last slice, in which `on_apply` updates variables.
        """
        states = list(zip(self.carried, sums.states, strict=True))
        scope = PhaseScope(states, self.step.versions, self.phase, last=last)
        calls, indices = iter(self.step.analysis.calls), itertools.count()

        def apply(optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]) -> None:
            next_call(self.model, calls, optimizer)
            index = next(indices)
            scope.change(variables, lambda: on_apply(index, gradients), not_capturing)

        share = self._share_of_examples(rows)
        reported = SliceNumbers(self.model, share, self.step.scalars, summed=self.step.summed)
        with scope, capturing_applies(apply) as not_capturing, counting_numbers(self.model, reported):
            logs = train_step_of(self.model)(rows)
        return scope, logs

    def _share_of_examples(self, rows: Batch) -> tf.Tensor:
        return self.step.share(WEIGHTINGS["examples"], rows)

    def _accumulate(self, index: int, total: list[tf.Tensor], gradients: Gradients, rows: Batch) -> list[tf.Tensor]:
        """Adds a call's gradients, weighted by the slice's share of the batch."""
        call, weight = self.step.analysis.calls[index], self.step.share(self.step.weightings[index], rows)
        present: list[GradientTensor] = [gradients[number] for number in call.indices]  # pyright: ignore
        variables = [call.variables[number] for number in call.indices]
        return [accumulate_gradient(*arguments, weight) for arguments in zip(variables, total, present, strict=True)]

    def _add_logs(self, total: list[tf.Tensor], logs: StepLogs, rows: Batch) -> list[tf.Tensor]:
        """Adds a slice's averaged logs, weighted by its share of the examples; sums over rows aren't weighted."""
        flat, share = keras.tree.flatten(logs), self._share_of_examples(rows)
        made_up_by = self.step.scalars.logs if self.step.scalars else [None] * len(flat)

        def weight(index: int) -> tf.Tensor:
            return tf.ones([]) if is_sum_of_parts(made_up_by[index], self.step.summed) else share

        return [
            before + tf.reduce_mean(tf.cast(flat[index], before.dtype)) * weight(index)
            for before, index in zip(total, self.averaged, strict=True)
        ]
