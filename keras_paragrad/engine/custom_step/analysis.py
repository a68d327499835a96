"""Analyzes a model's own `train_step`, in a graph that never runs: what it updates, and what each update depends on.

An update by an optimizer needs the gradients of all slices, so what reads the updated weights runs after all slices of
what computed the gradient. The step is thus divided into *phases*: within one, no slice reads a weight that another
one's gradient updates.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from keras_paragrad.compat.model import all_variables, step_metrics, train_step_of
from keras_paragrad.compat.types import Batch, Gradients
from keras_paragrad.engine.losses.loss_normalization import IndivisibleError
from keras_paragrad.engine.probes.trial import is_seed
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.step.interception import capturing_applies

# Operations that write a variable bear one of these words; Keras's own assignments are kept in the scope.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")


class ApplyCall(NamedTuple):
    """A call of `optimizer.apply` in the step.

    Attributes:
        optimizer: The optimizer.
        variables: The variables that it was called with.
        places: The positions of those that have a gradient.
        phase: The phase in which the gradient is computed.
    """

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    places: list[int]
    phase: int


class StateUpdate(NamedTuple):
    """A variable that the step assigns.

    Attributes:
        variable: The variable.
        phase: The first phase in which its new value can be computed.
        by_slice: Whether each slice updates it, as metrics, batch statistics and seeds are; else it is assigned once,
            after the updates that it depends on, as an averaged weight or a counter of updates is.
        needed: The phases that compute it.
    """

    variable: keras.Variable
    phase: int
    by_slice: bool
    needed: frozenset[int]


class LoggedValue(NamedTuple):
    """A value that the step returns.

    Attributes:
        phase: The first phase in which it can be computed.
        by_slice: Whether it is computed from the rows of a slice alone; else the last slice has the batch's, as the
            result of a metric.
    """

    phase: int
    by_slice: bool


class WeightChange(NamedTuple):
    """A change of a weight that is trainable: by a call of an optimizer, or by an assignment, such as weight clipping.

    Attributes:
        position: The number of operations before it.
        phase: The phase in which it happens.
    """

    position: int
    phase: int


class StepAnalysis(NamedTuple):
    """What a step does.

    Attributes:
        calls: The calls of optimizers, in their order.
        states: The variables that the step assigns, but for weights.
        logs: For each value that the step returns, flat; `None` for what isn't a tensor.
        weights: The weights that the step changes, by their ids.
        events: The changes of each weight, by its id, in their order.
        versions: For each phase, the versions of weights that it reads and an earlier phase has overwritten: pairs of a
            weight's id and the number of its changes before.
        phases: The number of phases.
    """

    calls: list[ApplyCall]
    states: list[StateUpdate]
    logs: list[LoggedValue | None]
    weights: dict[int, keras.Variable]
    events: dict[int, list[WeightChange]]
    versions: list[set[tuple[int, int]]]

    @property
    def phases(self) -> int:
        """The number of phases."""
        return len(self.versions)


def analyze_step(model: keras.Model, data: Batch) -> StepAnalysis:
    """Analyzes a model's own `train_step`.

    Args:
        model: A built model.
        data: Tensors with the shapes and dtypes of a slice.

    Raises:
        IndivisibleError: The step can't be divided.
    """
    graph = FuncGraph("custom_step")
    scope = _RecordingScope(graph)
    recorded: list[_Recorded] = []

    def record(optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]) -> None:
        tensors = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        if any(getattr(tensor, "graph", graph) is not graph for tensor in tensors):
            raise IndivisibleError(
                f"The train_step of {type(model).__name__} calls {optimizer.name!r} within a tf.function, a tf.cond or "
                "a loop of TensorFlow's, where its gradients can't be combined with others. Call it in train_step "
                "itself, and write Python's if and for around it."
            )
        recorded.append(_Recorded(optimizer, variables, gradients, len(graph.get_operations())))

    known = all_variables(model)
    with graph.as_default(), untouched(model, scope), capturing_applies(record):
        batch = keras.tree.map_structure(_placeholder, data)
        logs = train_step_of(model)(batch)
    values = {id(each): scope.values.pop(id(each)) for each in known if id(each) in scope.values}
    if scope.values:
        raise IndivisibleError(
            f"The train_step of {type(model).__name__} assigns a keras.Variable that isn't the model's, so its batches "
            "can't be divided. Make it an attribute of the model."
        )
    step = _TracedStep(model, graph, keras.tree.flatten(batch), known, recorded, values, scope.positions)
    return step.analyze(keras.tree.flatten(logs))


class _RecordingScope(keras.StatelessScope):
    """Notes the last value that each variable is assigned, and how many operations a graph has at each assignment."""

    def __init__(self, graph: FuncGraph):
        super().__init__(collect_losses=True)
        self._graph = graph
        self.values: dict[int, Any] = {}
        self.positions: dict[int, list[int]] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Assigns a variable. Trainable ones are still read themselves, so that a tape can watch them."""
        variable, value = update
        if not variable.trainable:
            super().add_update(update)
        self.values[id(variable)] = value
        self.positions.setdefault(id(variable), []).append(len(self._graph.get_operations()))


class _Recorded(NamedTuple):
    """A call of `apply`, with the number of operations before it."""

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    gradients: Gradients
    position: int


class _Sources(NamedTuple):
    """What a tensor is computed from.

    Attributes:
        reads: The variables that it reads, with the position of each read.
        by_slice: Whether it depends on the rows, or on random numbers.
    """

    reads: set[tuple[int, int]]
    by_slice: bool


def _placeholder(tensor: Any) -> Any:
    if tensor is None:
        return None
    if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)):
        raise IndivisibleError(
            f"Its train_step takes a {type(tensor).__name__}, and only dense tensors can be divided. Give fit() dense "
            "tensors."
        )
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)


class _TracedStep:
    """A traced step, whose graph shows what everything is computed from."""

    def __init__(
        self,
        model: keras.Model,
        graph: FuncGraph,
        batch: Sequence[Any],
        known: Sequence[keras.Variable],
        recorded: Sequence[_Recorded],
        values: dict[int, Any],
        assigned_at: dict[int, list[int]],
    ):
        self.model, self.graph, self.recorded = model, graph, recorded
        self.values, self.assigned_at = values, assigned_at
        # How many assignments of each weight are among its changes.
        self._assignments: Counter[int] = Counter()
        self.position = {operation: index for index, operation in enumerate(graph.get_operations())}
        self.batch = {tensor.op for tensor in batch if tensor is not None}
        self.weights = {id(variable) for each in recorded for variable in each.variables}
        self.weights |= {id(variable) for variable in known if variable.trainable and id(variable) in values}
        optimized = [variable for each in recorded for variable in each.variables]
        of_optimizers = [variable for each in recorded for variable in _counters_and_slots(each.optimizer)]
        self.variables = {id(each): each for each in (*known, *optimized, *of_optimizers)}
        handles = {id(each.value.handle): each for each in self.variables.values()}
        # The variable of each captured handle; what else is captured is no variable of Keras's.
        self.captured: dict[Any, keras.Variable | None] = {
            inner.op: handles.get(id(outer)) for outer, inner in graph.captures if inner.dtype == tf.resource
        }
        self.seeds = {id(each) for each in known if is_seed(each)}
        self.metrics = {id(variable) for metric in step_metrics(model) for variable in metric.variables}

    def analyze(self, logs: Sequence[Any]) -> StepAnalysis:
        """Divides the step into phases."""
        self._refuse_writes()
        if not self.recorded:
            raise self._refusal("doesn't call apply or apply_gradients of an optimizer")
        events: dict[int, list[WeightChange]] = {}
        calls = []
        # By optimizer, the events of its own variables: a phase that reads them follows.
        for each in self.recorded:
            self._add_assignments(events, before=each.position)
            sources = self._sources(each.gradients)
            updated = [*each.variables, *_counters_and_slots(each.optimizer)]
            earlier = [event.phase for variable in updated for event in events.get(id(variable), ())]
            # Not before an earlier update of the same weights.
            phase = max([self._phase_of(sources, events, by_slice=True), *earlier])
            for variable in updated:
                events.setdefault(id(variable), []).append(WeightChange(each.position, phase))
            calls.append(ApplyCall(each.optimizer, each.variables, _present(each.gradients), phase))
        self._add_assignments(events, before=len(self.position) + 1)
        updates = [self._update(key, value, events) for key, value in self.values.items() if key not in self.weights]
        logged = [self._logged(value, events) for value in logs]
        phases = [*(call.phase for call in calls), *(update.phase for update in updates)]
        phases += [log.phase for log in logged if log]
        computed: list[list[Any]] = [[] for _ in range(1 + max(phases))]
        for each, call in zip(self.recorded, calls, strict=True):
            computed[call.phase] += each.gradients
        for update in updates:
            computed[update.phase].append(self.values[id(update.variable)])
        for value, log in zip(logs, logged, strict=True):
            if log:
                computed[log.phase].append(value)
        by_slice = {id(update.variable) for update in updates if update.by_slice}
        closures = [self._closure(tensors, by_slice) for tensors in computed]
        versions = [self._versions(reads, events, phase) for phase, (reads, _) in enumerate(closures)]
        states = [
            update._replace(needed=frozenset({update.phase, *self._phases_with(id(update.variable), closures)}))
            for update in updates
        ]
        weights = {key: self.variables[key] for key in self.weights}
        return StepAnalysis(calls, states, logged, weights, events, versions)

    def _add_assignments(self, events: dict[int, list[WeightChange]], *, before: int) -> None:
        """Adds the assignments of trained weights up to a position."""
        for key in self.weights & self.assigned_at.keys():
            sources = self._sources([self.values[key]])
            if sources.by_slice:
                raise self._refusal(
                    f"assigns {self.variables[key].path}, which is trainable, a value that depends on the rows. Set "
                    "trainable=False on it if no optimizer updates it"
                )
            changes = events.setdefault(key, [])
            for position in self.assigned_at[key][self._assignments[key] :]:
                if position < before:
                    earlier = [change.phase for change in changes if change.position <= position]
                    phase = self._phase_of(sources, events, by_slice=False, at=position)
                    changes.append(WeightChange(position, max([phase, *earlier])))
                    self._assignments[key] += 1
            changes.sort()

    def _update(self, key: int, value: Any, events: dict[int, list[WeightChange]]) -> StateUpdate:
        sources = self._sources([value])
        by_slice = key in self.seeds | self.metrics or sources.by_slice
        phase = self._phase_of(sources, events, by_slice=by_slice)
        return StateUpdate(self.variables[key], phase, by_slice, frozenset())

    def _logged(self, value: Any, events: dict[int, list[WeightChange]]) -> LoggedValue | None:
        if not isinstance(value, tf.Tensor):
            return None
        sources = self._sources([value])
        is_result = any(variable in self.metrics for variable, _ in sources.reads)
        phase = self._phase_of(sources, events, by_slice=sources.by_slice)
        return LoggedValue(phase, sources.by_slice and not is_result)

    def _phase_of(
        self, sources: _Sources, events: dict[int, list[WeightChange]], *, by_slice: bool, at: int | None = None
    ) -> int:
        """The first phase in which a value can be computed."""
        phases = [
            # The last slice of a phase reads what it has updated; the others don't.
            event.phase + by_slice
            for variable, position in sources.reads
            for event in events.get(variable, ())
            if event.position <= position and (at is None or event.position < at)
        ]
        return max(phases, default=0)

    def _closure(self, tensors: list[Any], by_slice: set[int]) -> tuple[set[tuple[int, int]], set[int]]:
        """What tensors are computed from, with the states of slices before: all reads, and these states."""
        reads, states, pending = set(), set(), [tensors]
        while pending:
            found = self._sources(pending.pop()).reads
            reads |= found
            for variable in {variable for variable, _ in found} & by_slice - states:
                states.add(variable)
                pending.append([self.values[variable]])
        return reads, states

    def _phases_with(self, state: int, closures: list[tuple[Any, set[int]]]) -> list[int]:
        return [phase for phase, (_, states) in enumerate(closures) if state in states]

    def _versions(
        self, reads: set[tuple[int, int]], events: dict[int, list[WeightChange]], phase: int
    ) -> set[tuple[int, int]]:
        """The overwritten versions of weights among what a phase reads."""
        versions = set()
        for variable, position in reads:
            happened = [event for event in events.get(variable, ()) if event.phase < phase]
            version = sum(event.position <= position for event in happened)
            if version < len(happened):
                if variable not in self.weights:
                    raise self._refusal(
                        f"computes from {self.variables[variable].path}, a variable of an optimizer, both before and "
                        "after an update"
                    )
                versions.add((variable, version))
        return versions

    def _sources(self, tensors: Iterable[Any]) -> _Sources:
        """What tensors are computed from."""
        pending = [op for tensor in tensors for op in _operations_of(tensor) if op.graph is self.graph]
        seen, reads, by_slice = set(), set(), False
        while pending:
            operation = pending.pop()
            if operation in seen:
                continue
            seen.add(operation)
            by_slice = by_slice or operation in self.batch or _is_random(operation)
            for tensor in operation.inputs:
                variable = self.captured.get(tensor.op)
                if variable is not None:
                    reads.add((id(variable), self.position[operation]))
                    by_slice = by_slice or id(variable) in self.seeds
                pending.append(tensor.op)
        return _Sources(reads, by_slice)

    def _refuse_writes(self) -> None:
        definition = self.graph.as_graph_def()
        for node in (*definition.node, *(node for each in definition.library.function for node in each.node_def)):
            if node.op.startswith(_WRITES):
                raise self._refusal(
                    f"assigns a tf.Variable (by {node.op}), which each part of a batch would do. Keep the value "
                    "in a keras.Variable of the model, from self.add_weight(..., trainable=False)",
                    ends="",
                )

    def _refusal(self, does: str, ends: str = ", so its batches can't be divided") -> IndivisibleError:
        return IndivisibleError(f"The train_step of {type(self.model).__name__} {does}{ends}.")


def _counters_and_slots(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables of an optimizer that an update changes."""
    return [variable for variable in optimizer.variables if variable is not getattr(optimizer, "_learning_rate", None)]


def _present(gradients: Gradients) -> list[int]:
    return [place for place, gradient in enumerate(gradients) if gradient is not None]


def _operations_of(tensor: Any) -> list[tf.Operation]:
    if isinstance(tensor, tf.IndexedSlices):
        return [tensor.values.op, tensor.indices.op]
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    return [tensor.op] if isinstance(tensor, tf.Tensor) and hasattr(tensor, "op") else []


def _is_random(operation: tf.Operation) -> bool:
    # The last are of `tf.random.Generator`.
    return any(word in operation.type for word in ("Random", "Multinomial", "StatefulStandard", "StatefulUniform"))
