"""The operations of a traced graph: their tensors' sizes, and whether they can be repeated.

A graph's tensors are numbered in the order in which their operations were created.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
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


def called_graphs(operation: tf.Operation) -> list[tf.Graph]:
    """The graphs of the functions that an operation calls."""
    graphs = []
    for name in _FUNCTIONS:
        try:
            functions = operation.get_attr(name)
        except ValueError:
            continue
        for function in functions if isinstance(functions, list) else [functions]:
            called: Any = operation.graph._get_function(function.name) if hasattr(function, "name") else None
            # Those that TensorFlow's own losses define, such as CTC's, show no graph.
            if hasattr(called, "graph"):
                graphs.append(called.graph)
    return graphs


# Marked as stateful, but repeatable: they read, check or print. Keras calls cuDNN's layers without their dropout.
_REPEATABLE = {"Assert", "CudnnRNNV2", "CudnnRNNV3", "LookupTableFindV2", "LookupTableSizeV2", "PrintV2"}
_CALLING = {"Case", "If", "StatefulPartitionedCall", "While"}
_VARIABLES = ("ReadVariable", "Assign", "Resource", "VarHandle", "VarIsInitialized")
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncated", "Stateful", "Rng")

_ASSIGNING = (
    *("Assign", "LookupTableInsert", "LookupTableRemove", "ResourceApply", "ResourceCountUpTo", "ResourceScatter"),
    *("ResourceSparseApply", "ResourceStridedSliceAssign"),
)
# Of a `tf.random.Generator`, whose state is their first input.
_DRAWING = ("Rng", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulRandomBinomial")


class HiddenState(NamedTuple):
    """An operation that draws random numbers or uses a state unknown to Keras, its problem, and advice."""

    operation: tf.Operation
    problem: str
    advice: str


def find_unrepeatable(operations: Iterable[tf.Operation], *, but_random: bool = False) -> HiddenState | None:
    """Finds the first operation whose second run may differ, if any; ignores random numbers if `but_random`."""
    for operation in _stateful(operations):
        kind = operation.type
        random = any(word in kind for word in _RANDOM)
        if kind in _REPEATABLE or kind.startswith(("Collective", "Nccl")) or (random and but_random):
            continue
        if any(word in kind for word in _VARIABLES):
            problem = "uses a tf.Variable that Keras does not know, which may hold another value when it runs again"
            return HiddenState(operation, problem, "Make it with self.add_weight")
        if random:
            advice = "Draw with keras.random, with seed=a keras.random.SeedGenerator that is an attribute of the layer"
            return HiddenState(operation, "draws random numbers, and would draw others when it runs again", advice)
        return HiddenState(operation, "may not do the same when it runs again", "Move it out of the layer")
    return None


def check_repeatable(name: str, operations: Iterable[tf.Operation]) -> None:
    """Refuses operations whose second run may differ."""
    if found := find_unrepeatable(operations):
        operation, problem, advice = found
        raise ValueError(
            f"{name!r} can't be recomputed: its operation {operation.name!r} ({operation.type}) {problem}. {advice}, "
            "or leave the layer out of `layers`."
        )


def find_hidden_state(operations: Iterable[tf.Operation]) -> HiddenState | None:
    """Finds the first operation that draws random numbers or changes a state unknown to Keras, if any."""
    for operation in _stateful(operations):
        if any(word in operation.type for word in _RANDOM):
            advice = "Draw with keras.random, with seed=a keras.random.SeedGenerator that is an attribute of the layer"
            return HiddenState(operation, "draws random numbers", advice)
        if operation.type.startswith(_ASSIGNING):
            advice = "Make it with self.add_weight, as an attribute of the layer"
            return HiddenState(operation, "assigns to a tf.Variable that Keras does not know", advice)
    return None


def draws_from_graph(operations: Iterable[tf.Operation]) -> bool:
    """Whether operations draw random numbers from states of their graph, as those of `tf.random` do."""
    return any(any(word in operation.type for word in _RANDOM[:4]) for operation in _stateful(operations))


def _stateful(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields the stateful operations, including operations of called functions."""
    for operation in operations:
        if not operation.op_def.is_stateful:
            continue
        if operation.type not in _CALLING:
            yield operation
            continue
        for body in called_graphs(operation):
            yield from _stateful(body.get_operations())


def assigned_resources(graph: tf.Graph) -> list[tf.Tensor]:
    """The outer resources, such as variables, that a function's graph assigns to, apart from random generators."""
    return _resources_of(graph, _ASSIGNING)


def random_generators(graph: tf.Graph) -> list[tf.Tensor]:
    """The outer resources of each `tf.random.Generator` from which a function's graph draws."""
    return _resources_of(graph, _DRAWING)


def _resources_of(graph: tf.Graph, types: tuple[str, ...]) -> list[tf.Tensor]:
    resources = _used(graph, {inner.name: outer for outer, inner in graph.captures}, types)
    return list({id(resource): resource for resource in resources}.values())


def _used(graph: tf.Graph, outside: dict[str, tf.Tensor], types: tuple[str, ...]) -> Iterator[tf.Tensor]:
    """Yields the outer resources of a graph's operations of these types; `outside` maps its tensors' names to them."""
    for operation in graph.get_operations():
        if not operation.op_def.is_stateful:
            continue
        if operation.type.startswith(types):
            yield from (outside[tensor.name] for tensor in operation.inputs[:1] if tensor.name in outside)
        # The first input of a condition selects the branch.
        arguments = operation.inputs[1:] if operation.type in ("Case", "If") else operation.inputs
        for body in called_graphs(operation):
            pairs = zip(body.inputs, arguments, strict=False)
            inner = {within.name: outside[passed.name] for within, passed in pairs if passed.name in outside}
            yield from _used(body, inner, types)
