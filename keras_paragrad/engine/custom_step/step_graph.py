"""Traces a custom `train_step` into a graph that never runs, and finds the sources of its values."""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.layers import WeightScope
from keras_paragrad.compat.model import all_layers, all_variables, step_metrics, train_step_of
from keras_paragrad.compat.private import FuncGraph
from keras_paragrad.compat.types import Batch, Gradients
from keras_paragrad.engine.custom_step.divided_calls import Handler, intercepting
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.probes.pure_function import is_seed, normalize_by_moving_statistics
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.storage.gathering import zeros_in_place_of_shards

# The operations that write to a variable begin with one of these; the scope records Keras's own assignments.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
# The operations that draw random numbers contain one of these; the last two are of `tf.random.Generator`.
_RANDOM = ("Random", "Multinomial", "StatefulStandard", "StatefulUniform")


class CapturedApply(NamedTuple):
    """A captured call of `optimizer.apply`, with a gradient or `None` for each variable.

    `position` is the number of operations before it.
    """

    optimizer: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    gradients: Gradients
    position: int

    @property
    def present(self) -> list[int]:
        """The indices of the variables that have a gradient."""
        return [index for index, gradient in enumerate(self.gradients) if gradient is not None]

    @property
    def updated(self) -> list[keras.Variable]:
        """The variables that the call updates: its arguments, and the optimizer's counters and slots."""
        rate = getattr(self.optimizer, "_learning_rate", None)
        return [*self.variables, *(variable for variable in self.optimizer.variables if variable is not rate)]


class Sources(NamedTuple):
    """The sources of tensors in a graph.

    Attributes:
        reads: The reads of variables: pairs of a variable's id and the read's position.
        by_slice: Whether the tensors depend on the batch's rows, or on random numbers.
    """

    reads: set[tuple[int, int]]
    by_slice: bool


class StepGraph:
    """The graph of a custom `train_step`. A position is a number of operations.

    Args:
        model: A built model.
        data: Tensors with the shapes and dtypes of a slice.
        handler: What happens in place of calls of layers, if each replica runs the step on the whole batch.

    Attributes:
        applies: The calls of `apply`, in order.
        logs: The values that the step returns, flat.
        log_names: Their names, by the `id` of a value.
        values: The last value that each variable of the model is assigned, by the variable's id.
        assigned_at: The positions of the assignments of each variable, by its id.
        variables: The variables of the model and of the optimizers, by id.
        weights: The ids of the trainable variables that are updated or assigned.
        metrics: The ids of the variables of metrics.
        seeds: The ids of the states of random seeds.
        losses: The losses that layers have added.

    Raises:
        IndivisibleError: The step can't be divided.
    """

    def __init__(self, model: keras.Model, data: Batch, handler: Handler | None = None):
        self.model, self._graph = model, FuncGraph("custom_step")
        self.applies: list[CapturedApply] = []
        if handler is None:
            self._refuse_synchronized_layers()
        scope, model_variables = _RecordingScope(self._graph), all_variables(model)
        with (
            self._graph.as_default(),
            zeros_in_place_of_shards(model_variables),
            untouched(model, scope),
            capturing_applies(self._capture),
            intercepting(handler) if handler else contextlib.nullcontext(),
        ):
            if handler is not None:
                # Synchronized layers would wait for other replicas.
                normalize_by_moving_statistics(model)
            batch = keras.tree.map_structure(_placeholder, data)
            logs = train_step_of(model)(batch)
        self.logs = keras.tree.flatten(logs)
        self.log_names = {id(value): repr(name) for name, value in logs.items()} if isinstance(logs, dict) else {}
        self.values, self.assigned_at, self.losses = scope.values, scope.positions, scope.losses
        self._position = {operation: index for index, operation in enumerate(self._graph.get_operations())}
        self._batch = {tensor.op for tensor in keras.tree.flatten(batch) if tensor is not None}
        self.weights = {id(variable) for call in self.applies for variable in call.variables}
        self.weights |= {
            id(variable) for variable in model_variables if variable.trainable and id(variable) in self.values
        }
        updated = [variable for call in self.applies for variable in call.updated]
        self.variables = {id(variable): variable for variable in (*model_variables, *updated)}
        self.seeds = {id(variable) for variable in model_variables if is_seed(variable)}
        self.metrics = {id(variable) for metric in step_metrics(model) for variable in metric.variables}
        handles = {id(handled.value.handle): id(handled) for handled in self.variables.values()}
        # The variable of each captured handle. Other resources, such as tables, aren't variables.
        self._captured: dict[tf.Operation, int | None] = {
            inner.op: handles.get(id(outer)) for outer, inner in self._graph.captures if inner.dtype == tf.resource
        }
        self._check({id(variable) for variable in model_variables})

    def _capture(
        self, optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """Records a call of `apply`; refuses one in another graph, such as a branch's."""
        tensors = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        if any(getattr(tensor, "graph", self._graph) is not self._graph for tensor in tensors):
            raise self.refusal(
                f"calls {optimizer.name!r} within a tf.function, a tf.cond or a loop of TensorFlow's, where its "
                "gradients can't be combined with others. Call it in train_step itself, and write Python's if and for "
                "around it",
                ends="",
            )
        self.applies.append(CapturedApply(optimizer, variables, gradients, len(self._graph.get_operations())))

    def _check(self, model_variables: set[int]) -> None:
        """Refuses assignments that each slice would repeat, and steps without an update."""
        if self.values.keys() - model_variables:
            raise self.refusal(
                "assigns a keras.Variable that isn't the model's, so its batches can't be divided. Make it an "
                "attribute of the model",
                ends="",
            )
        definition = self._graph.as_graph_def()
        for node in (
            *definition.node,
            *(node for function in definition.library.function for node in function.node_def),
        ):
            if node.op.startswith(_WRITES):
                raise self.refusal(
                    f"assigns a tf.Variable (by {node.op}), which each part of a batch would do. Keep the value "
                    "in a keras.Variable of the model, from self.add_weight(..., trainable=False)",
                    ends="",
                )
        if not self.applies:
            raise self.refusal("doesn't call apply or apply_gradients of an optimizer")

    def _refuse_synchronized_layers(self) -> None:
        """Refuses synchronized layers, whose gradients cross replicas before they are weighted."""
        names = [
            layer.name
            for layer in all_layers(self.model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and layer.trainable
        ]
        if names and replica_count() > 1:
            raise self.refusal(
                f"computes gradients that are weighted afterwards, and {', '.join(names)} normalize by the statistics "
                "of all replicas",
                ends=". Use GroupNormalization, move what it does into compute_loss, or leave microbatch out",
            )

    def refusal(self, does: str, ends: str = ", so its batches can't be divided") -> IndivisibleError:
        """The error for a step that can't be divided: a sentence about what it `does`, and its end."""
        return IndivisibleError(f"The train_step of {type(self.model).__name__} {does}{ends}.")

    @property
    def operations(self) -> list[tf.Operation]:
        """The operations of the graph, by position."""
        return self._graph.get_operations()

    def sources(self, values: Iterable[object], given: Iterable[object] = ()) -> Sources:
        """Finds the sources of values, stopping at `given` ones. Values outside of the graph are constants."""
        pending = [operation for value in values for operation in _operations_of(value)]
        pending = [operation for operation in pending if operation.graph is self._graph]
        visited = {operation for value in given for operation in _operations_of(value)}
        reads, by_slice = set(), False
        while pending:
            operation = pending.pop()
            if operation in visited:
                continue
            visited.add(operation)
            by_slice = by_slice or operation in self._batch or any(word in operation.type for word in _RANDOM)
            for tensor in operation.inputs:
                variable = self._captured.get(tensor.op)
                if variable is not None:
                    reads.add((variable, self._position[operation]))
                    by_slice = by_slice or variable in self.seeds
                pending.append(tensor.op)
        return Sources(reads, by_slice)


class _RecordingScope(WeightScope):
    """Records each variable's last assigned value, and the positions of all assignments."""

    def __init__(self, graph: FuncGraph):
        super().__init__(collect_losses=True)
        self._graph = graph
        self.values: dict[int, object] = {}
        self.positions: dict[int, list[int]] = {}

    def add_update(self, update: tuple[keras.Variable, object]) -> None:
        """Records an assignment. Trainable variables keep their values, so that a tape watches their reads."""
        variable, value = update
        if not variable.trainable:
            super().add_update(update)
        self.values[id(variable)] = value
        self.positions.setdefault(id(variable), []).append(len(self._graph.get_operations()))


def _placeholder(tensor: object) -> tf.Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)):
        raise IndivisibleError(
            f"Its train_step takes a {type(tensor).__name__}, and only dense tensors can be divided. Give fit() dense "
            "tensors."
        )
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape)


def _operations_of(value: object) -> list[tf.Operation]:
    """The operations that a value is computed by."""
    if isinstance(value, tf.IndexedSlices):
        return [value.values.op, value.indices.op]
    tensor: object = value.value if isinstance(value, keras.Variable) else value  # pyright: ignore
    return [tensor.op] if isinstance(tensor, tf.Tensor) and hasattr(tensor, "op") else []
