"""Runs a model's own `train_step` slice by slice, phase by phase, with one update for each call of an optimizer."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.model import step_metrics, train_step_of
from keras_paragrad.compat.state import MethodPatch, patched
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.step.stages import BatchSlices
from keras_paragrad.storage.row_gradients import accumulate_gradient, sum_dtype

# Updates variables with the gradients of the batch: called with the call of `apply` and all its gradients.
Update = Callable[[ApplyCall, list[Any]], None]


class _Sums(NamedTuple):
    """What is carried from slice to slice.

    Attributes:
        gradients: For each call of the phase, the weighted sums of its gradients.
        states: The values of the states that slices update.
        logs: The weighted sums of the logged values of the phase.
    """

    gradients: list[list[tf.Tensor]]
    states: list[tf.Tensor]
    logs: list[tf.Tensor]


class Versions:
    """Copies of trained weights from before their updates, for what later phases compute from both.

    Args:
        analysis: What the step does.
        make_variables: Calls a function that makes variables, where they can be made.
    """

    def __init__(self, analysis: StepAnalysis, make_variables: Callable[[Callable[[], Any]], Any]):
        self.analysis = analysis
        versions = sorted(set().union(*analysis.versions))
        self.copies: dict[tuple[int, int], tf.Variable] = make_variables(
            lambda: {each: self._copy(each[0]) for each in versions}
        )

    def _copy(self, key: int) -> tf.Variable:
        """A variable, and not a tensor, so that the tape of a step watches what it reads."""
        weight = self.analysis.weights[key]
        return tf.Variable(tf.zeros(weight.shape, weight.dtype))

    def keep(self, variable: keras.Variable, version: int) -> None:
        """Copies a weight before a change, if a later phase reads this version."""
        copy = self.copies.get((id(variable), version))
        if copy is not None:
            copy.assign(variable.value)

    def read(self, key: int, version: int, phase: int) -> Any:
        """What a phase reads in place of a weight; `None` for the weight itself."""
        return self.copies[key, version] if (key, version) in self.analysis.versions[phase] else None


class SlicedStep:
    """Runs the phases of one step.

    Args:
        model: The model.
        analysis: What its step does.
        versions: The copies of weights.
        weightings: What each call's gradient is divided by.
        share: The weight of a slice in the batch, by what is divided by.
        update: Updates variables.
        summed: Whether the step reports sums over the rows, and not means.
    """

    def __init__(
        self,
        model: keras.Model,
        analysis: StepAnalysis,
        versions: Versions,
        weightings: Sequence[Weighting],
        share: Callable[[Weighting, Any], tf.Tensor],
        update: Update,
        *,
        summed: bool,
    ):
        self.model, self.analysis, self.versions = model, analysis, versions
        self.weightings, self.share, self.update, self.summed = weightings, share, update, summed
        self._values: dict[int, tf.Tensor] = {}
        self._logs: dict[int, Any] = {}
        self._structure: Any = None

    def run(
        self,
        slices: BatchSlices,
        at_end: Callable[[], AbstractContextManager[None]] = nullcontext,
        nonempty: tf.Tensor | None = None,
    ) -> Any:
        """Runs all phases, and returns the logs.

        Args:
            slices: The slices.
            at_end: Makes the context of the last slice of each phase.
            nonempty: Whether the rows count; they do, if `None`. Else they leave the states of slices as they are.
        """
        for phase in range(self.analysis.phases):
            _Phase(self, phase).run(slices, at_end)
        for state in self.analysis.states:
            if id(state.variable) in self._values:
                value = self._values[id(state.variable)]
                if state.by_slice and nonempty is not None:
                    value = tf.where(nonempty, value, state.variable.value)
                state.variable.assign(value)
        flat = [self._logs.get(place, leaf) for place, leaf in enumerate(keras.tree.flatten(self._structure))]
        return keras.tree.pack_sequence_as(self._structure, flat)

    def keep(self, phase: int, scope: keras.StatelessScope, logs: Any, sums: list[tf.Tensor]) -> None:
        """Keeps the new values and the logs of a phase, after its last slice."""
        self._structure = logs
        for state in self.analysis.states:
            value = scope.get_current_value(state.variable)
            if state.phase == phase and value is not None:
                self._values[id(state.variable)] = value
        flat, averaged = keras.tree.flatten(logs), iter(sums)
        for place, log in enumerate(self.analysis.logs):
            if log and log.phase == phase:
                self._logs[place] = next(averaged) if log.by_slice else flat[place]


def changed_order(model: keras.Model) -> RuntimeError:
    """The error for a step that doesn't call its optimizers as it did when it was analyzed."""
    return RuntimeError(
        f"The train_step of {type(model).__name__} calls its optimizers differently each time it is traced, so its "
        "batches can't be divided. Let it call the same ones in the same order."
    )


class _Phase:
    """One phase of a step."""

    def __init__(self, step: SlicedStep, phase: int):
        self.step, self.phase, self.model, self.analysis = step, phase, step.model, step.analysis
        calls = enumerate(self.analysis.calls)
        self.calls = [index for index, call in calls if call.phase == phase]
        self.carried = [state.variable for state in self.analysis.states if state.by_slice and phase in state.needed]
        logs = enumerate(self.analysis.logs)
        self.averaged = [place for place, log in logs if log and log.by_slice and log.phase == phase]

    def run(self, slices: BatchSlices, at_end: Callable[[], AbstractContextManager[None]]) -> None:
        """Sums the gradients over the slices, and updates variables while the last one runs."""
        sums = self._start()
        if not (isinstance(slices.number, int) and slices.number == 0):
            sums = tf.while_loop(
                lambda index, _: index < slices.number,
                lambda index, sums: (index + 1, self._add(sums, slices.at(index))),
                (tf.constant(0), sums),
                parallel_iterations=1,
            )[1]
        with at_end():
            self._finish(sums, slices.last)

    def _start(self) -> _Sums:
        gradients = [
            [tf.zeros(call.variables[place].shape, sum_dtype(call.variables[place])) for place in call.places]
            for call in (self.analysis.calls[index] for index in self.calls)
        ]
        states = [tf.convert_to_tensor(variable.value) for variable in self.carried]
        return _Sums(gradients, states, [tf.constant(0.0) for _ in self.averaged])

    def _add(self, sums: _Sums, rows: Batch) -> _Sums:
        """Adds a slice that isn't the last, without any update."""
        captured: dict[int, Gradients] = {}
        scope, logs = self._run(sums, rows, captured.__setitem__)
        gradients = [
            self._sum(index, total, captured[index], rows)
            for index, total in zip(self.calls, sums.gradients, strict=True)
        ]
        states = [current_value(scope, variable) for variable in self.carried]
        return _Sums(gradients, states, self._logged(sums.logs, logs, rows))

    def _finish(self, sums: _Sums, rows: Batch) -> None:
        """Runs the last slice, in which optimizers update variables when the step calls them."""
        totals = dict(zip(self.calls, sums.gradients, strict=True))

        def update(index: int, gradients: Gradients) -> None:
            if index in totals:
                call = self.analysis.calls[index]
                total = self._sum(index, totals[index], gradients, rows)
                whole: list[Any] = [None] * len(call.variables)
                for place, gradient in zip(call.places, total, strict=True):
                    whole[place] = tf.cast(gradient, call.variables[place].dtype)
                self.step.update(call, whole)

        scope, logs = self._run(sums, rows, update, last=True)
        self.step.keep(self.phase, scope, logs, self._logged(sums.logs, logs, rows))

    def _run(
        self, sums: _Sums, rows: Batch, on_apply: Callable[[int, Gradients], object], *, last: bool = False
    ) -> tuple[Any, Any]:
        """Runs the step on a slice; `on_apply` gets the index of each call of an optimizer, and its gradients."""
        states = list(zip(self.carried, sums.states, strict=True))
        scope = PhaseScope(states, self.step.versions, self.phase, last=last)
        calls, called = self.analysis.calls, 0

        def apply(optimizer: Any, gradients: Gradients, variables: list[keras.Variable]) -> None:
            nonlocal called
            if called >= len(calls) or calls[called].optimizer is not optimizer:
                raise changed_order(self.model)
            called += 1
            scope.change(variables, lambda: on_apply(called - 1, gradients), released)

        means = weighting_means(self.model, self._share(rows), summed=self.step.summed)
        with scope, capturing_applies(apply) as released, means:
            logs = train_step_of(self.model)(rows)
        return scope, logs

    def _share(self, rows: Batch) -> tf.Tensor:
        return self.step.share(WEIGHTINGS["examples"], rows)

    def _sum(self, index: int, total: list[tf.Tensor], gradients: Gradients, rows: Batch) -> list[tf.Tensor]:
        call, weight = self.analysis.calls[index], self.step.share(self.step.weightings[index], rows)
        present: list[GradientTensor] = [gradients[place] for place in call.places]  # pyright: ignore
        variables = [call.variables[place] for place in call.places]
        return [accumulate_gradient(*each, weight) for each in zip(variables, total, present, strict=True)]

    def _logged(self, before: list[tf.Tensor], logs: Any, rows: Batch) -> list[tf.Tensor]:
        flat, share = keras.tree.flatten(logs), tf.constant(1.0) if self.step.summed else self._share(rows)
        return [
            total + tf.cast(tf.reduce_mean(flat[place]), total.dtype) * share
            for total, place in zip(before, self.averaged, strict=True)
        ]


class PhaseScope(keras.StatelessScope):
    """The scope of one slice: what the step assigns stays in it, but for changes of weights in the last slice.

    Weights have the values of the version that the whole batch's step would read.
    """

    def __init__(self, states: list[tuple[keras.Variable, tf.Tensor]], versions: Versions, phase: int, *, last: bool):
        # Otherwise what layers add to the losses would be left out.
        super().__init__(states, collect_losses=True)
        self._versions, self._phase, self._last = versions, phase, last
        self._events = versions.analysis.events
        self._changes = dict.fromkeys(self._events, 0)
        for key in self._events:
            self._show(key)

    def change(self, variables: Sequence[keras.Variable], update: Callable[[], object], released: Any) -> None:
        """Runs a call of an optimizer if this slice does, and goes to the next version of its weights."""
        phases = {self._events[id(each)][self._changes[id(each)]].phase for each in variables}
        if phases == {self._phase} and self._last:
            for each in variables:
                self._versions.keep(each, self._changes[id(each)])
            with released(), suspended_scope():
                update()
        elif self._phase in phases:
            update()
        self.pass_over(variables)

    def pass_over(self, variables: Sequence[keras.Variable]) -> None:
        """Goes to the next version of weights that an optimizer was called with."""
        for each in variables:
            self._advance(id(each))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Assigns a variable."""
        variable, value = update
        if id(variable) not in self._events:
            super().add_update(update)
            return
        event = self._events[id(variable)][self._changes[id(variable)]]
        if event.phase == self._phase and self._last:
            self._versions.keep(variable, self._changes[id(variable)])
            with suspended_scope():
                variable.assign(value)
        self._advance(id(variable))

    def _advance(self, key: int) -> None:
        self._changes[key] += 1
        self._show(key)

    def _show(self, key: int) -> None:
        """Maps a weight to a copy of its current version, if that is overwritten, and needed."""
        copy = self._versions.read(key, self._changes[key], self._phase)
        if copy is None:
            self.state_mapping.pop(key, None)
        else:
            self.state_mapping[key] = copy


def current_value(scope: keras.StatelessScope, variable: keras.Variable) -> tf.Tensor:
    """A variable's value in a scope, with its static shape."""
    value = scope.get_current_value(variable)
    return tf.ensure_shape(tf.convert_to_tensor(value), variable.shape)


@contextmanager
def suspended_scope() -> Generator[None]:
    """Context in which Keras's variables are read and assigned again, within a stateless scope."""
    scope = get_global_attribute("stateless_scope")
    set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        set_global_attribute("stateless_scope", scope)


class _WeightedMeans(MethodPatch):
    """Makes a model's `Mean`s weight the number of a slice by its share of the batch, which then counts once.

    Numbers that are sums over the rows are added, and count once as well.
    """

    def __init__(self, model: keras.Model, summed: bool):
        super().__init__()
        self.model, self.summed = model, summed
        self.shares: dict[int, tf.Tensor] = {}

    def patch_all(self) -> None:
        for metric in step_metrics(self.model):
            if type(metric).update_state is keras.metrics.Mean.update_state:
                self.replace(metric, "update_state", self._weighted(metric.update_state))

    def _weighted(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0 and sample_weight is None:
                share = self.shares[replica_index()]
                values = tf.math.divide_no_nan(values, tf.cast(share, values.dtype)) if self.summed else values
                return update(values, sample_weight=share)
            return update(values, sample_weight=sample_weight)

        return update_state


@contextmanager
def weighting_means(model: keras.Model, share: tf.Tensor, *, summed: bool) -> Generator[None]:
    """Context of a slice, in which scalars that `Mean`s are updated with count by the slice's share of the batch."""
    with patched(model, lambda: _WeightedMeans(model, summed)) as means:
        means.shares[replica_index()] = share
        yield
