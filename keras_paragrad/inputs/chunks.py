"""Chunk sizes: as many rows as fit into a memory budget, estimated from a row's forward pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.inputs.modes import Jacobian
from keras_paragrad.inputs.seeds import PARALLEL_PASSES

# Larger chunks are no faster for small rows: a few thousand already amortize the overhead.
MOST_ROWS = 8192
BUDGET = 256 * 2**20

# Operations whose output shares the memory of their input.
_ALIASES = {"Reshape", "Identity", "IdentityN", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape"}


def rows_within_budget(bytes_per_row: float) -> int:
    """The rows that fit into `BUDGET`: at least one, and at most `MOST_ROWS`."""
    return int(min(max(BUDGET // max(bytes_per_row, 1), 1), MOST_ROWS))


def bytes_of_derivative(method: Any, held: float, free: float, outputs: int, second: bool) -> float:
    """An estimate of the bytes needed to differentiate a row.

    Args:
        method: How it is differentiated.
        held: Bytes of its forward pass.
        free: Bytes of its differentiated inputs.
        outputs: Number of output entries.
        second: Whether it is differentiated twice.
    """
    if not isinstance(method, Jacobian):
        # Much of the forward pass is freed early, making room for the backward pass. The rest is copies of the result.
        return (4 if second else 1) * held + 4 * free
    # The concurrent backward passes besides the forward pass; and the result stacked, transposed and as an array.
    passes = outputs if method.mode == "vectorized" else PARALLEL_PASSES
    return (1 + passes / 2) * held + 3 * outputs * free


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
        if node.name not in reached and not any(_source(name) in reached for name in node.input):
            continue
        reached.add(node.name)
        if node.op != "Placeholder" and node.op not in _ALIASES:
            total += sum(_elements(shape) for shape in node.attr["_output_shapes"].list.shape) * _item_size(node)
        times = _steps(node, by_name) if node.op in ("While", "StatelessWhile") else 1
        total += times * sum(_bytes_in_function(name, functions) for name in _called(node))
    return total


def _bytes_in_function(name: str, functions: Mapping[str, Any]) -> int:
    function = functions[name]
    arguments = {argument.name for argument in function.signature.input_arg if argument.type != tf.resource}
    return _bytes_of(function.node_def, arguments, functions)


def _called(node: Any) -> list[str]:
    called = [attribute.func.name for attribute in node.attr.values() if attribute.HasField("func")]
    return called + [function.name for attribute in node.attr.values() for function in attribute.list.func]


def _steps(loop: Any, by_name: Mapping[str, Any]) -> int:
    """The length of the longest tensor list that enters a loop: the number of steps of a recurrent layer."""
    lengths = [1]
    for name in loop.input:
        made = by_name.get(_source(name))
        if made is not None and made.op == "TensorListFromTensor":
            read = by_name[_source(made.input[0])].attr["_output_shapes"].list.shape
            lengths += [shape.dim[0].size for shape in read[:1] if shape.dim]
        if made is not None and made.op == "TensorListReserve":
            length = by_name[_source(made.input[1])]
            if length.op == "Const":
                lengths.append(int(tf.make_ndarray(length.attr["value"].tensor)))
    return max(lengths)


def _source(name: str) -> str:
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
