"""Runs a derivative on chunks of rows: in one compiled function, on every replica.

The *leaves* of a chunk are its arrays: the flattened inputs of the model, then what the derivative takes besides, such
as vectors or labels.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_layers, compile_if_supported
from keras_paragrad.compat.operations import SAME_BUFFER
from keras_paragrad.compat.types import Specs
from keras_paragrad.engine.tracing.effects import assigned_resources, called_graphs
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.inputs.function import Differentiate, Output, RowFunction
from keras_paragrad.inputs.rows import Chunk
from keras_paragrad.inputs.selection import Selection
from keras_paragrad.memory.blocks import Resized
from keras_paragrad.per_example.mixing_layers import find_mixing_layer

# From the bytes of a row's forward pass, the bytes of its differentiated inputs and the number of its output entries,
# estimates the bytes needed to differentiate it.
EstimateBytes = Callable[[float, float, int], float]

# Larger chunks are no faster for small rows: a few thousand already amortize the overhead.
MOST_ROWS = 8192
BUDGET = 256 * 2**20

_KEEPS_STATE = (
    "so a row's derivatives would depend on the rows before it, and later predictions would differ from earlier ones."
)


class Execution:
    """Compiles a derivative for the first chunk, and runs it on every chunk.

    Args:
        model: The model.
        selection: The inputs that are differentiated.
        output: The output that is differentiated.
        jit_compile: Whether to compile with XLA; `"auto"` follows the model.
    """

    def __init__(self, model: keras.Model, selection: Selection, output: Output, jit_compile: bool | str):
        self.model, self.selection, self.output = model, selection, output
        self.jit_compile = compile_if_supported(
            model, model.jit_compile if jit_compile == "auto" else bool(jit_compile)
        )
        self.strategy = model.distribute_strategy
        self._function: Any = None

    def build(self, first: list[np.ndarray]) -> None:
        """Builds the model on the first row, if it is not built; refuses a model that keeps a state or mixes rows."""
        inputs = self._cast(first, slice(0, 1))[: len(self.selection.names)]
        if not self.model.built:
            with self.strategy.scope(), keras.StatelessScope():
                self.model(keras.tree.pack_sequence_as(self.selection.structure, inputs))
        _check_stateless(self.model)
        specs = [tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype) for leaf in inputs]
        _check_independent_rows(self.model, keras.tree.pack_sequence_as(self.selection.structure, specs))

    def run_first(self, chunk: Chunk, methods: Sequence[Differentiate]) -> list[np.ndarray]:
        """The results of the first chunk, by the first of `methods` that raises no error; `run` uses that one too."""
        leaves = self._distribute(chunk)
        *others, last = methods
        for method in others:
            try:
                return self._run_first_by(method, leaves)
            except Exception:
                # If the error is not specific to this method, the last one raises it again.
                continue
        return self._run_first_by(last, leaves)

    def run(self, chunk: Chunk) -> list[np.ndarray]:
        """The results of another chunk, one array for each source of the derivative."""
        values, _ = self._function(self._distribute(chunk), tf.constant(False))
        return [self._gather(value) for value in values]

    def bytes_per_row(self, first: list[np.ndarray], estimate: EstimateBytes) -> float:
        """An estimated upper bound of the bytes to differentiate a row, from a trace of the forward pass."""
        rows = min(len(first[0]), MOST_ROWS)
        specs = [tf.TensorSpec((rows, *leaf.shape[1:]), leaf.dtype) for leaf in self._cast(first, slice(0, 1))]

        # The entries of a row of each source, set by the trace.
        sizes: list[int] = []

        def forward(leaves: list[tf.Tensor]):
            function, _ = self._row_function(leaves)
            free = function.free_values()
            sizes[:] = [tensor.shape[1:].num_elements() or 0 for tensor in free]
            return function(free)

        traced = trace_untouched(self.model, forward, specs)
        forward_bytes = bytes_in_graph(traced.graph, traced.inputs[: len(specs)]) / rows
        return estimate(forward_bytes, 4 * sum(sizes), traced.outputs[0].shape[1:].num_elements())

    def _run_first_by(self, method: Differentiate, leaves: list[tf.Tensor]) -> list[np.ndarray]:
        """Compiles a method, runs it on the first chunk, and checks the result."""
        try:
            self._function = self._compile(method, leaves)
        except ValueError as error:
            if refusal := _saved_loop_refusal(self.model, error):
                raise refusal from error
            raise
        values, is_valid = self._function(leaves, tf.constant(True))
        if not self._gather(is_valid).all():
            raise ValueError(
                "Forward mode and reverse mode disagree: TensorFlow can't differentiate some gradient in this model, "
                "such as bilinear resizing's or, under XLA, max-pooling's. Write mode='reverse'."
            )
        return [self._gather(value) for value in values]

    def _compile(self, method: Differentiate, leaves: list[tf.Tensor]) -> Callable[..., list[tf.Tensor]]:
        """A function that differentiates a chunk on all replicas, for one shape."""

        def derivative(leaves: list[tf.Tensor], check: tf.Tensor):
            function, extra = self._row_function(leaves)
            free = function.free_values()
            values, is_valid = method(function, free, extra, check)
            pairs = zip(values, free, strict=True)
            # With an axis, as `_gather` concatenates the replicas' results.
            return [tf.cast(value, tensor.dtype) for value, tensor in pairs], tf.reshape(is_valid, [1])

        def replica(*arguments: Any):
            if not self.jit_compile:
                return derivative(*arguments)
            # XLA compiles per replica: a single function would use one replica's variables for all.
            return tf.function(derivative, jit_compile=True, autograph=False)(*arguments)

        function = tf.function(releasing(lambda *parts: self.strategy.run(replica, args=parts)), autograph=False)
        # Concrete, so that another shape raises instead of retracing.
        concrete = function.get_concrete_function(leaves, tf.constant(True))
        _check_no_assignments(self.model, concrete.graph)
        return concrete

    def _row_function(self, leaves: Sequence[tf.Tensor]) -> tuple[RowFunction, list[tf.Tensor]]:
        """The row function of a chunk, and the leaves that are neither inputs nor labels."""
        count = len(self.selection.names)
        inputs, extra, labels = list(leaves[:count]), list(leaves[count:]), None
        if isinstance(self.output, np.ndarray):
            *extra, labels = extra
        return RowFunction(self.model, self.selection, self.output, inputs, labels), extra

    def _cast(self, leaves: list[np.ndarray], rows: slice) -> list[np.ndarray]:
        """Selects rows of the leaves, and casts the inputs that are differentiated to their dtypes."""
        leaves = [leaf[rows] for leaf in leaves]
        for source in self.selection.inputs:
            leaves[source.number] = leaves[source.number].astype(source.dtype, copy=False)
        return leaves

    def _distribute(self, chunk: Chunk) -> list[tf.Tensor]:
        """A chunk's inputs, cast, and split equally over the replicas."""
        leaves = self._cast(chunk.leaves, slice(None))
        size = len(leaves[0]) // self.strategy.num_replicas_in_sync

        def replica_part(context: tf.distribute.experimental.ValueContext):
            start = context.replica_id_in_sync_group * size
            return [tf.constant(leaf[start : start + size]) for leaf in leaves]

        return self.strategy.experimental_distribute_values_from_function(replica_part)

    def _gather(self, value: tf.Tensor) -> np.ndarray:
        """Concatenates a result of all replicas along the rows, as an array."""
        parts = [part.numpy() for part in self.strategy.experimental_local_results(value)]
        if len(parts) < self.strategy.num_replicas_in_sync:
            raise ValueError(
                "The model's strategy has replicas in other processes, whose results can't be read here. Load the "
                "model without the strategy, and give each process its own rows."
            )
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def bytes_of_gradient(forward: float, inputs: float, outputs: int) -> float:
    """The `EstimateBytes` of a gradient."""
    # Much of the forward pass is freed early, making room for the backward pass. The rest is copies of the result.
    return forward + 4 * inputs


def rows_within_budget(bytes_per_row: float) -> int:
    """The rows that fit into `BUDGET`: at least one, and at most `MOST_ROWS`."""
    return int(min(max(BUDGET // max(bytes_per_row, 1), 1), MOST_ROWS))


def bytes_in_graph(graph: tf.Graph, inputs: Iterable[tf.Tensor]) -> int:
    """The bytes of everything that a graph computes from some of its inputs, including its functions and loops.

    Tensors that don't depend on these inputs, such as cast weights, are left out. A loop body counts once for each
    entry of the longest tensor list that the loop reads or writes.
    """
    dependent = {tensor.ref() for tensor in inputs}
    total = 0
    for operation in graph.get_operations():
        if dependent.isdisjoint(tensor.ref() for tensor in operation.inputs):
            continue
        dependent.update(tensor.ref() for tensor in operation.outputs)
        if operation.type not in SAME_BUFFER:
            total += sum(Resized(1).bytes_of(tensor) for tensor in operation.outputs)
        times = _loop_steps(operation) if operation.type in ("While", "StatelessWhile") else 1
        for function in called_graphs(operation):
            values = [tensor for tensor in function.inputs if tensor.dtype != tf.resource]
            total += times * bytes_in_graph(function, values)
    return total


def _loop_steps(loop: tf.Operation) -> int:
    """The length of the longest tensor list that enters a loop: the number of steps of a recurrent layer."""
    lengths = [1]
    for producer in (tensor.op for tensor in loop.inputs):
        if producer.type == "TensorListFromTensor" and producer.inputs[0].shape.rank:
            lengths.append(producer.inputs[0].shape[0] or 1)
        if producer.type == "TensorListReserve" and (length := tf.get_static_value(producer.inputs[1])) is not None:
            lengths.append(int(length))
    return max(lengths)


def _check_stateless(model: keras.Model) -> None:
    """Refuses a model with a layer of `stateful=True`."""
    names = [layer.name for layer in all_layers(model) if getattr(layer, "stateful", False)]
    if names:
        raise ValueError(
            f"{', '.join(map(repr, dict.fromkeys(names)))}: a stateful layer keeps its state from one call to the "
            f"next, {_KEEPS_STATE} Build the same model with stateful=False, and copy the weights: for old, new in "
            "zip(model.trainable_variables, stateless.trainable_variables): new.assign(old)."
        )


def _check_independent_rows(model: keras.Model, specs: Specs) -> None:
    """Refuses a model that mixes rows."""
    layer = find_mixing_layer(model, specs, training=False)
    if layer:
        raise ValueError(
            f"The output of {layer!r} for one row depends on the other rows, so a row has no derivative of its own. "
            "Don't reduce over the batch axis 0, or differentiate with a tf.GradientTape."
        )


def _saved_loop_refusal(model: keras.Model, error: ValueError) -> ValueError | None:
    """The error in place of TensorFlow's internal one for the gradient of a loop in a loaded SavedModel."""
    names = [layer.name for layer in all_layers(model) if isinstance(layer, keras.layers.TFSMLayer)]
    if not names or "without handle data" not in str(error):
        return None
    return ValueError(
        f"TensorFlow can't differentiate the SavedModel of {', '.join(map(repr, names))} in a graph: it has a loop, "
        "such as an LSTM's, and was differentiated eagerly before. Make the layer anew, with "
        "keras.layers.TFSMLayer(filepath), or export its model again with unroll=True for its recurrent layers."
    )


def _check_no_assignments(model: keras.Model, graph: tf.Graph) -> None:
    """Refuses a model that assigns to a variable in inference mode; random seeds may advance."""
    names = {id(variable.handle): variable.name.split(":")[0] for variable in graph.variables}
    paths = {names.get(id(resource), "a table") for resource in assigned_resources(graph)}
    assigned = sorted(path for path in paths if not path.endswith("seed_generator_state"))
    if assigned:
        raise ValueError(
            f"{model.name!r} assigns to {', '.join(assigned)} when it is called with training=False, {_KEEPS_STATE} "
            "In the layer's call(), assign only `if training:`."
        )
