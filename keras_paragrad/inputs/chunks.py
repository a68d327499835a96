"""Chunk sizes: as many rows as fit into a memory budget, estimated from a row's forward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

# From the bytes of a row's forward pass, the bytes of its differentiated inputs and the number of its output entries,
# estimates the bytes needed to differentiate it.
EstimateBytes = Callable[[float, float, int], float]

# Larger chunks are no faster for small rows: a few thousand already amortize the overhead.
MOST_ROWS = 8192
BUDGET = 256 * 2**20

# Operations whose output shares the memory of their input.
_ALIASES = {"Reshape", "Identity", "IdentityN", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape"}


def rows_within_budget(bytes_per_row: float) -> int:
    """The rows that fit into `BUDGET`: at least one, and at most `MOST_ROWS`."""
    return int(min(max(BUDGET // max(bytes_per_row, 1), 1), MOST_ROWS))


def bytes_of_gradient(forward: float, inputs: float, outputs: int) -> float:
    """The `EstimateBytes` of a gradient."""
    # Much of the forward pass is freed early, making room for the backward pass. The rest is copies of the result.
    return forward + 4 * inputs


def bytes_in_graph(graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> int:
    """The bytes of everything that a graph computes from its inputs, including its functions and loops.

    Tensors that don't depend on the inputs, such as cast weights, are left out. A loop body counts once for each entry
    of the longest tensor list that the loop reads or writes.
    """
    definition = graph.as_graph_def(add_shapes=True)
    functions = {function.signature.name: function for function in definition.library.function}
    return _bytes_of(definition.node, {tensor.op.name for tensor in inputs}, functions)


def _bytes_of(nodes: Any, reached: set[str], functions: Mapping[str, Any]) -> int:
    total = 0
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if node.name not in reached and not any(_producer(name) in reached for name in node.input):
            continue
        reached.add(node.name)
        if node.op != "Placeholder" and node.op not in _ALIASES:
            total += sum(_elements(shape) for shape in node.attr["_output_shapes"].list.shape) * _item_size(node)
        times = _steps(node, by_name) if node.op in ("While", "StatelessWhile") else 1
        total += times * sum(_bytes_in_function(functions[name], functions) for name in _called_functions(node))
    return total


def _bytes_in_function(function: Any, functions: Mapping[str, Any]) -> int:
    arguments = {argument.name for argument in function.signature.input_arg if argument.type != tf.resource}
    return _bytes_of(function.node_def, arguments, functions)


def _called_functions(node: Any) -> list[str]:
    names = [attribute.func.name for attribute in node.attr.values() if attribute.HasField("func")]
    return names + [function.name for attribute in node.attr.values() for function in attribute.list.func]


def _steps(loop: Any, by_name: Mapping[str, Any]) -> int:
    """The length of the longest tensor list that enters a loop: the number of steps of a recurrent layer."""
    lengths = [1]
    for name in loop.input:
        producer = by_name.get(_producer(name))
        if producer is not None and producer.op == "TensorListFromTensor":
            shapes = by_name[_producer(producer.input[0])].attr["_output_shapes"].list.shape
            lengths += [shape.dim[0].size for shape in shapes[:1] if shape.dim]
        if producer is not None and producer.op == "TensorListReserve":
            length = by_name[_producer(producer.input[1])]
            if length.op == "Const":
                lengths.append(int(tf.make_ndarray(length.attr["value"].tensor)))
    return max(lengths)


def _producer(name: str) -> str:
    """The node that produces a node's input."""
    return name.removeprefix("^").split(":")[0]


def _elements(shape: Any) -> int:
    count = 0 if shape.unknown_rank else 1
    for axis in shape.dim:
        count *= max(axis.size, 1)
    return count


def _item_size(node: Any) -> int:
    for key in ("DstT", "T", "dtype"):
        if node.attr[key].type:
            return tf.as_dtype(node.attr[key].type).size or 4
    return 4
