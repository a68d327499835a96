"""Counts the floating-point operations of a step."""

import math
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_paragrad.engine.telemetry.train_functions import BACKWARD

# The scope in which TensorFlow differentiates another scope.
_GRADIENTS = "gradient_tape"
# Operations with a body that runs an unknown number of times, or of unknown cost.
_UNKNOWN = re.compile("While|If$|Case$|PartitionedCall|RNN|XlaLaunch|SparseTensorDenseMatMul|SparseMatMul|Fused")


def flops_of(graph: tf.Graph) -> int | None:
    """The FLOPs of a function's matrix products and convolutions; a multiply-add counts as two.

    They are unknown, and `None`, with loops, branches, calls or unknown shapes. Elementwise operations, such as
    activations, are excluded: they are few, and a device's peak doesn't include them. Operations that neither outputs
    nor effects need are excluded, as TensorFlow prunes them. So are those that a backward pass runs a second time.
    """
    # What the backward pass differentiates, it runs a second time.
    paths = [operation.name.split("/") for operation in graph.get_operations()]
    recomputed = {tuple(path[1:3]) for path in paths if path[:2] == [_GRADIENTS, BACKWARD]}
    total = 0
    for operation in _needed(graph):
        if tuple(operation.name.split("/")[:2]) in recomputed:
            continue
        flops = flops_of_operation(operation)
        if flops is None:
            return None
        total += flops
    return total


def _needed(graph: Any) -> set[tf.Operation]:
    """The operations that a function's outputs and effects depend on."""
    needed: set[tf.Operation] = set()
    waiting = [*map(_source, graph.outputs), *graph.control_outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [*map(_source, operation.inputs), *operation.control_inputs]
    return needed


def _source(tensor: tf.Tensor) -> tf.Operation:
    """The operation that makes a tensor. A custom gradient passes all of its results through one operation."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op


def flops_of_operation(operation: tf.Operation) -> int | None:
    """The FLOPs of one operation, zero if it is elementwise, or `None` if they are unknown."""
    if _UNKNOWN.search(operation.type):
        return None
    count = _COUNTS.get(operation.type)
    try:
        return 2 * count(operation) if count else 0
    except (TypeError, ValueError):
        # A size is `None`, or not even the rank is known.
        return None


def _sizes(tensor: tf.Tensor) -> list[Any]:
    return tensor.shape.as_list()


def _matmul(operation: tf.Operation) -> int:
    """The number of multiplications of matrix products."""
    transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    return math.prod(_sizes(operation.outputs[0])) * _sizes(operation.inputs[0])[-2 if transposed else -1]


def _einsum(operation: tf.Operation) -> int:
    """The multiplications of `tf.einsum`; raises `ValueError` where the sizes of labels aren't known."""
    subscripts = operation.get_attr("equation").decode().partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(subscripts, operation.inputs, strict=True):
        if "..." in labels:
            raise ValueError("an ellipsis")
        sizes.update(zip(labels, _sizes(tensor), strict=True))
    # A multiplication for each combination of labels; a single operand is only summed.
    return math.prod(sizes.values()) if len(subscripts) > 1 else 0


def _convolution(output: int | None, kernel: int | None, output_axes: int = 1) -> Callable[[tf.Operation], int]:
    """Makes a function that counts the multiplications of a convolution, or of one of its gradients.

    It multiplies the sizes of the output, or its gradient, and of the kernel without its last `output_axes` axes. Each
    is the operation's input of an index, or the operation's output.
    """

    def count(operation: tf.Operation) -> int:
        output_sizes, kernel_sizes = (
            _sizes(operation.outputs[0] if index is None else operation.inputs[index]) for index in (output, kernel)
        )
        return math.prod(output_sizes) * math.prod(kernel_sizes[:-output_axes])

    return count


_COUNTS: dict[str, Callable[[tf.Operation], int]] = {
    "MatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution(None, 1),
    "Conv2DBackpropInput": _convolution(2, 1),
    "Conv2DBackpropFilter": _convolution(2, None),
    "Conv3D": _convolution(None, 1),
    "Conv3DBackpropInputV2": _convolution(2, 1),
    "Conv3DBackpropFilterV2": _convolution(2, None),
    "DepthwiseConv2dNative": _convolution(None, 1, output_axes=2),
    "DepthwiseConv2dNativeBackpropInput": _convolution(2, 1, output_axes=2),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(2, None, output_axes=2),
}
