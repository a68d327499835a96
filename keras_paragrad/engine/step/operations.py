"""A traced graph as plain values: what its operations read and make, in bytes."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# The attributes that name an operation's functions, in the order in which `TracedOperation.blocks` has them.
_FUNCTIONS = ("f", "cond", "body", "then_branch", "else_branch", "branches")
_WITHOUT_MEMORY = (tf.resource, tf.variant, tf.string)


class TracedOperation(NamedTuple):
    """One operation of a graph.

    Attributes:
        kind: Its type, such as `"MatMul"`.
        inputs: Numbers of the tensors that it reads.
        outputs: Numbers of the tensors that it makes.
        sizes: Bytes of each output; 0 for resources and lists of tensors.
        value: Its output, if that is one integer or boolean known without running the graph; else `None`.
        blocks: The functions that it calls: the condition and the body of a loop, or the branches of a condition.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    value: Any = None
    blocks: tuple["Block", ...] = ()


class Block:
    """A function's operations that are run, in the order in which they were traced.

    Attributes:
        operations: The operations without the function's inputs.
        inputs, outputs: Numbers of the tensors that it is given and that it returns.
        input_sizes: Bytes of the inputs.
        uses: How often each tensor is read or returned.
    """

    def __init__(
        self,
        operations: list[TracedOperation],
        inputs: list[int],
        outputs: list[int],
        input_sizes: list[int],
    ):
        self.operations, self.inputs, self.outputs, self.input_sizes = operations, inputs, outputs, input_sizes
        self.uses = Counter(number for operation in operations for number in operation.inputs)
        self.uses.update(outputs)


class Numbered(NamedTuple):
    """A graph's operations, and how to find its tensors among them.

    Attributes:
        block: The operations.
        numbers: Each tensor's number, by its `ref()`.
        places: How many operations come before the one that was made as the n-th.
    """

    block: Block
    numbers: dict[Any, int]
    places: list[int]


def block_of(graph: Any, rows: int) -> Numbered:
    """The operations of a `FuncGraph`.

    Args:
        graph: The graph.
        rows: What to take for the first axis of a tensor if its size is unknown.
    """
    inputs = {tensor.ref() for tensor in graph.inputs}
    numbers: dict[Any, int] = {}
    for operation in graph.get_operations():
        for tensor in operation.outputs:
            numbers[tensor.ref()] = len(numbers)

    def all_of(tensors):
        return tuple(numbers[tensor.ref()] for tensor in tensors)

    size = functools.partial(_size, rows=rows)
    operations, places = _in_order(graph, inputs)
    made = [
        TracedOperation(
            each.type,
            all_of(each.inputs),
            all_of(each.outputs),
            tuple(map(size, each.outputs)),
            _value(each),
            tuple(block_of(called, rows).block for called in _called(each)),
        )
        for each in operations
    ]
    block = Block(made, list(all_of(graph.inputs)), list(all_of(graph.outputs)), [*map(size, graph.inputs)])
    return Numbered(block, numbers, places)


def _in_order(graph: Any, inputs: set[Any]) -> tuple[list[Any], list[int]]:
    """Operations as they were made, but each after what it reads: a gradient adds inputs to the loop before it."""
    ordered: dict[Any, None] = {}
    places = []
    for operation in graph.get_operations():
        places.append(len(ordered))
        waiting = [operation]
        while waiting:
            each = waiting[-1]
            missing = [tensor.op for tensor in each.inputs if tensor.ref() not in inputs and tensor.op not in ordered]
            if missing and each not in ordered:
                waiting += missing
                continue
            waiting.pop()
            if not (each.outputs and each.outputs[0].ref() in inputs):
                ordered[each] = None
    needed = _needed(ordered, graph.outputs)
    before = [0, *itertools.accumulate(each in needed for each in ordered)]
    return [each for each in ordered if each in needed], [before[place] for place in (*places, len(ordered))]


def _needed(operations: Iterable[Any], outputs: Iterable[tf.Tensor]) -> set[Any]:
    """The operations without those that TensorFlow prunes: they change no state, and nothing reads what they make."""
    waiting = [each for each in operations if not each.outputs or each.op_def.is_stateful]
    waiting += [tensor.op for tensor in outputs]
    needed = set()
    while waiting:
        each = waiting.pop()
        if each not in needed:
            needed.add(each)
            waiting += [*(tensor.op for tensor in each.inputs), *each.control_inputs]
    return needed


def _size(tensor: tf.Tensor, rows: int) -> int:
    if tensor.dtype in _WITHOUT_MEMORY or tensor.shape.rank is None:
        return 0
    known = [(rows if axis == 0 else 1) if size is None else size for axis, size in enumerate(tensor.shape)]
    return math.prod(known) * tensor.dtype.size


def _value(operation: Any) -> Any:
    if len(operation.outputs) != 1:
        return None
    (output,) = operation.outputs
    if not (output.dtype.is_integer or output.dtype.is_bool) or output.shape.num_elements() != 1:
        return None
    found = tf.get_static_value(output)
    return None if found is None else np.asarray(found).reshape(-1)[0].item()


def _called(operation: Any) -> list[Any]:
    graphs = []
    for name in _FUNCTIONS:
        try:
            given = operation.get_attr(name)
        except ValueError:
            continue
        for function in given if isinstance(given, list) else [given]:
            if hasattr(function, "name") and (found := operation.graph._get_function(function.name)) is not None:
                graphs.append(found.graph)
    return graphs
