"""The operations of a traced graph, and their tensors' sizes.

A graph's tensors are numbered in the order in which their operations were created.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.engine.tracing.effects import called_graphs

_WITHOUT_MEMORY = (tf.resource, tf.variant, tf.string)


class TracedOperation(NamedTuple):
    """One operation of a graph.

    Attributes:
        kind: Its type, such as `"MatMul"`.
        inputs: Numbers of its input tensors.
        outputs: Numbers of its output tensors.
        sizes: Bytes of each output; 0 for resources and lists of tensors.
        value: The output, if it is a static integer or boolean scalar; otherwise `None`.
        blocks: The functions that it calls: a loop's condition and body, or a condition's branches.
        flops: Its floating-point operations, if they were counted.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    value: int | bool | None = None
    blocks: tuple["Block", ...] = ()
    flops: float = 0.0


class Block:
    """A function's operations that run, in the order in which they were traced, without placeholders.

    Tensors are numbered. `input_sizes` are the inputs' bytes; `uses` counts how often a tensor is read or returned.
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

    @property
    def size(self) -> int:
        """The number of operations, including operations of called functions."""
        return sum(1 + sum(block.size for block in operation.blocks) for operation in self.operations)

    @property
    def has_convolution(self) -> bool:
        """Whether an operation, of the block or of a called function, is a convolution."""
        return any(
            operation.kind.startswith(("Conv", "DepthwiseConv"))
            or any(block.has_convolution for block in operation.blocks)
            for operation in self.operations
        )


class Numbered(NamedTuple):
    """A graph's operations, and the numbers of its tensors, by their `ref()`.

    `positions` has, for the n-th operation of the graph, the number of operations before it in the block, and at its
    end the number of all operations in the block, which leaves some out.
    """

    block: Block
    numbers: dict[Hashable, int]
    positions: list[int]


class Resized(NamedTuple):
    """How a graph that was traced for a batch reads for a batch of another size.

    Attributes:
        rows: The rows of the other batch; also the size of a tensor's first axis if it is unknown.
        traced: The rows of the traced batch, a number that divides the size of no other axis; by default `rows`.
        count_flops: Counts the floating-point operations of an operation of the traced batch; by default, none.
    """

    rows: int
    traced: int | None = None
    count_flops: Callable[[tf.Operation], int | None] | None = None

    def bytes_of(self, tensor: tf.Tensor) -> int:
        """The bytes of a tensor; 0 for resources and lists of tensors."""
        if tensor.dtype in _WITHOUT_MEMORY or tensor.shape.rank is None:
            return 0
        known = [(self.rows if axis == 0 else 1) if size is None else size for axis, size in enumerate(tensor.shape)]
        if self.traced:
            known = [size // self.traced * self.rows if self._counts_rows(size) else size for size in known]
        return math.prod(known) * tensor.dtype.size

    def flops_of(self, operation: tf.Operation) -> float:
        """An operation's counted floating-point operations, for `rows` rows."""
        flops = (self.count_flops and self.count_flops(operation)) or 0
        if not (flops and self.traced):
            return flops
        axes = [sum(map(self._counts_rows, tensor.shape)) for tensor in (*operation.inputs, *operation.outputs)]
        # A tensor of rows by rows has two such axes, and grows with their square.
        return flops * (self.rows / self.traced) ** max(axes)

    def _counts_rows(self, size: int | None) -> bool:
        return bool(self.traced and size and size % self.traced == 0)


def block_of(graph: tf.Graph, sizes: Resized) -> Numbered:
    """Reads a `FuncGraph` and the functions that it calls; `sizes` says for which batch size."""
    inputs = {tensor.ref() for tensor in graph.inputs}
    numbers: dict[Hashable, int] = {}
    for operation in graph.get_operations():
        for tensor in operation.outputs:
            numbers[tensor.ref()] = len(numbers)

    def numbers_of(tensors: Iterable[tf.Tensor]):
        return tuple(numbers[tensor.ref()] for tensor in tensors)

    operations, positions = _in_order(graph, inputs)
    traced = [
        TracedOperation(
            operation.type,
            numbers_of(operation.inputs),
            numbers_of(operation.outputs),
            tuple(map(sizes.bytes_of, operation.outputs)),
            _value(operation),
            tuple(block_of(function, sizes).block for function in called_graphs(operation)),
            sizes.flops_of(operation),
        )
        for operation in operations
    ]
    input_sizes = [*map(sizes.bytes_of, graph.inputs)]
    block = Block(traced, list(numbers_of(graph.inputs)), list(numbers_of(graph.outputs)), input_sizes)
    return Numbered(block, numbers, positions)


def _in_order(graph: tf.Graph, inputs: set[Hashable]) -> tuple[list[tf.Operation], list[int]]:
    """Operations in the order of their creation, but after their inputs: a gradient adds inputs to an earlier loop.

    Leaves out placeholders and what TensorFlow prunes. Also returns `Numbered.positions`.
    """
    ordered: dict[tf.Operation, None] = {}
    positions = []
    for operation in graph.get_operations():
        positions.append(len(ordered))
        waiting = [operation]
        while waiting:
            last = waiting[-1]
            missing = [tensor.op for tensor in last.inputs if tensor.ref() not in inputs and tensor.op not in ordered]
            if missing and last not in ordered:
                waiting += missing
                continue
            waiting.pop()
            if not (last.outputs and last.outputs[0].ref() in inputs):
                ordered[last] = None
    needed = _needed(ordered, graph.outputs)
    before = [0, *itertools.accumulate(op in needed for op in ordered)]
    return [op for op in ordered if op in needed], [before[position] for position in (*positions, len(ordered))]


def _needed(operations: Iterable[tf.Operation], outputs: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """The operations that TensorFlow doesn't prune: they change state, or something needs their outputs."""
    waiting = [operation for operation in operations if not operation.outputs or operation.op_def.is_stateful]
    waiting += [tensor.op for tensor in outputs]
    needed = set()
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return needed


def _value(operation: tf.Operation) -> int | bool | None:
    """The static value of an operation's only output, an integer or a boolean; else `None`."""
    if len(operation.outputs) != 1:
        return None
    (output,) = operation.outputs
    if not (output.dtype.is_integer or output.dtype.is_bool) or output.shape.num_elements() != 1:
        return None
    value = tf.get_static_value(output)
    return None if value is None else np.asarray(value).reshape(-1)[0].item()
