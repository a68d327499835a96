"""The time of a traced step on this machine: its operations are counted, and a few are timed."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from keras_paragrad.memory.blocks import Block, Resized, block_of
from keras_paragrad.memory.liveness import ALIASES, known_value
from keras_paragrad.memory.traced_step import TracedStep

# Iterations of a loop that are followed to find how often it runs.
_MOST_ITERATIONS = 10_000
_NOT_COMPUTED = ALIASES | {"Const", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp"}
# Timings of an operation; their median counts.
_TIMINGS = 5
# Iterations of the loop in which small operations are timed, and operations of each.
_ITERATIONS, _OPERATIONS = 50, 12


class Cost(NamedTuple):
    """What operations take.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions.
        bytes: Bytes of their results.
        operations: Number of operations.
    """

    flops: float = 0.0
    bytes: float = 0.0
    operations: float = 0.0

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """This cost and another, several times."""
        return Cost(*(mine + times * others for mine, others in zip(self, other, strict=True)))


class Speed(NamedTuple):
    """What a device computes: FLOPs a second, bytes written a second, and seconds that any operation takes."""

    flops: float
    bytes: float
    operation: float

    def seconds(self, cost: Cost) -> float:
        """The time that operations take."""
        return cost.flops / self.flops + cost.bytes / self.bytes + cost.operations * self.operation


def cost_of(step: TracedStep) -> tuple[Cost, Cost]:
    """The costs of a step's forward and backward pass, and of its update.

    Loops count as often as they run, where that is known; conditions by their larger branch.
    """
    values: dict[int, int | bool | None] = {}
    gradient = _cost(step.block, values, slice(0, step.updates_from))
    return gradient, _cost(step.block, values, slice(step.updates_from, None))


def bytes_of_results(graph: tf.Graph) -> float:
    """The bytes of everything that a graph computes, with its functions, and with loops as often as they run."""
    return _cost(block_of(graph, Resized(1)).block, {}, slice(None)).bytes


def _cost(block: Block, values: dict[int, int | bool | None], part: slice) -> Cost:
    """The cost of some operations of a block.

    `values` has the integers and booleans that are known, by the numbers of their tensors; results are added to it.
    """
    total = Cost()
    for operation in block.operations[part]:
        inputs = [values.get(number) for number in operation.inputs]
        if operation.kind in ("While", "StatelessWhile"):
            condition, body = operation.blocks
            inside = dict(zip(body.inputs, inputs, strict=True))
            total = total.plus(_cost(body, inside, slice(None)), _iterations(condition, body, inputs))
            continue
        if operation.blocks:
            # Of several blocks, branches, the first input chooses one.
            arguments = inputs if len(operation.blocks) == 1 else inputs[1:]
            known = [dict(zip(called.inputs, arguments, strict=False)) for called in operation.blocks]
            costs = [_cost(*pair, slice(None)) for pair in zip(operation.blocks, known, strict=True)]
            total = total.plus(max(costs, key=lambda cost: (cost.flops, cost.bytes)))
            continue
        if operation.outputs:
            values[operation.outputs[0]] = known_value(operation, inputs)
        if operation.kind not in _NOT_COMPUTED:
            total = total.plus(Cost(operation.flops, sum(operation.sizes), 1))
    return total


def _iterations(condition: Block, body: Block, state: Sequence[int | bool | None]) -> int:
    """How often a loop runs; once, if that isn't known."""
    for iteration in range(_MOST_ITERATIONS):
        proceed = _outputs(condition, state)[0]
        if proceed is None:
            return 1
        if not proceed:
            return iteration
        state = _outputs(body, state)
    return _MOST_ITERATIONS


def _outputs(block: Block, inputs: Sequence[int | bool | None]) -> list[int | bool | None]:
    """The known integers and booleans among a function's results."""
    values = dict(zip(block.inputs, inputs, strict=True))
    for operation in block.operations:
        if operation.outputs and not operation.blocks:
            values[operation.outputs[0]] = known_value(operation, [values.get(number) for number in operation.inputs])
    return [values.get(number) for number in block.outputs]


@functools.cache
def measure_speed() -> Speed:
    """The speed of the device that TensorFlow uses by default, from a matrix product, a sum and a loop."""
    size, elements = 1024, 4 * 2**20
    with tf.init_scope():
        square, small = tf.ones((size, size)), tf.ones((32, 32))
        product = _seconds(lambda: tf.matmul(square, square))
        # Large enough to leave the caches, as the tensors of a step do.
        large = tf.ones((elements,))
        written = _seconds(lambda: large * 2.0)
        operation = _seconds(lambda: _loop(small)) / (_ITERATIONS * _OPERATIONS)
    return Speed(2 * size**3 / product, 4 * elements / written, operation)


@tf.function(autograph=False)
def _loop(matrix: tf.Tensor) -> tf.Tensor:
    """A loop over small operations, as slices and recurrent layers run."""

    def body(index: tf.Tensor, matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(_OPERATIONS // 3):
            matrix = tf.tanh(tf.matmul(matrix, matrix) + 1.0)
        return index + 1, matrix

    return tf.while_loop(lambda index, _: index < _ITERATIONS, body, (tf.constant(0), matrix))[1]


def _seconds(run: Callable[[], tf.Tensor]) -> float:
    """The median time of a function's result, from the second run on."""
    run().numpy()
    times = []
    for _ in range(_TIMINGS):
        start = time.perf_counter()
        run().numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
