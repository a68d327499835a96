"""Replaces operations that DTensor lacks or computes wrong by equivalent ones.

Each function has the signature of the operation that it replaces, and returns `None` to keep the original. To *pin* a
tensor is to divide it among the devices by rows only.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.operations import array_ops, gen_array_ops, gen_manip_ops, gen_nn_ops
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Array
from keras_paragrad.engine.mesh.pinning import pin_on_mesh
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout


def reverse(tensor: tf.Tensor, axis: Array, name: str | None = None) -> tf.Tensor | None:
    """`tf.reverse`; `None` unless the axes are static."""
    tensor, axes = tf.convert_to_tensor(tensor), tf.get_static_value(axis)
    if axes is None:
        return None
    for dimension in np.ravel(axes):
        tensor = _permute(tensor, int(dimension), lambda order: order[::-1])
    return tensor


def roll(input: tf.Tensor, shift: Array, axis: Array, name: str | None = None) -> tf.Tensor | None:
    """`tf.roll`; `None` unless shifts and axes are static."""
    tensor, shifts, axes = tf.convert_to_tensor(input), tf.get_static_value(shift), tf.get_static_value(axis)
    if shifts is None or axes is None:
        return None
    for dimension, by in zip(np.ravel(axes), np.ravel(shifts), strict=True):
        tensor = _permute(tensor, int(dimension), functools.partial(np.roll, shift=int(by)))
    return tensor


def space_to_batch(input: tf.Tensor, block_shape: Array, paddings: Array, name: str | None = None) -> tf.Tensor | None:
    """`tf.space_to_batch_nd`, with the blocks of an example in consecutive rows, and so on one device.

    `None` unless the sizes are static.
    """
    block, padding = _static_pair(block_shape, paddings)
    if block is None:
        return None
    tensor = pin_on_mesh(tf.convert_to_tensor(input))
    tensor = tf.pad(tensor, [[0, 0], *padding, *[[0, 0]] * (len(tensor.shape) - len(block) - 1)])
    rows, *sizes = _static_sizes(tensor)
    # Axes that aren't divided into blocks, such as channels.
    others = sizes[len(block) :]
    inner = [size // factor for size, factor in zip(sizes, block, strict=False)]
    tensor = tf.reshape(tensor, [rows, *(part for pair in zip(inner, block, strict=True) for part in pair), *others])
    # From [rows, inner, block, inner, block, ..., others] to [rows, blocks, inners, others].
    order = [0, *range(2, 2 * len(block) + 1, 2), *range(1, 2 * len(block), 2)]
    tensor = tf.transpose(tensor, [*order, *range(2 * len(block) + 1, len(tensor.shape))])
    return tf.reshape(tensor, [rows * math.prod(block), *inner, *others])


def batch_to_space(input: tf.Tensor, block_shape: Array, crops: Any, name: str | None = None) -> tf.Tensor | None:
    """`tf.batch_to_space` for the result of `space_to_batch`."""
    block, crops = _static_pair(block_shape, crops)
    if block is None:
        return None
    tensor = tf.convert_to_tensor(input)
    count, (rows, *sizes) = len(block), _static_sizes(tensor)
    rows //= math.prod(block)
    tensor = pin_on_mesh(tf.reshape(tensor, [rows, *block, *sizes]))
    # From [rows, blocks, inners, others] to [rows, inner, block, inner, block, ..., others].
    order = [position for axis in range(1, count + 1) for position in (count + axis, axis)]
    tensor = tf.transpose(tensor, [0, *order, *range(2 * count + 1, len(tensor.shape))])
    whole = [size * factor for size, factor in zip(sizes, block, strict=False)]
    tensor = pin_on_mesh(tf.reshape(tensor, [rows, *whole, *sizes[count:]]))
    # Not `tf.slice`, whose gradient is a different operation under XLA.
    return tensor[(slice(None), *(slice(a, size - b) for size, (a, b) in zip(whole, crops, strict=True)))]


def _static_sizes(tensor: tf.Tensor) -> list[Any]:
    return tensor.shape.as_list()


def _static_pair(block_shape: Any, pairs: Any) -> tuple[list[int] | None, list[list[int]]]:
    """The values of a block shape, and of pairs of paddings or crops; `(None, [])` unless both are static."""
    block, values = tf.get_static_value(block_shape), tf.get_static_value(pairs)
    return (None, []) if block is None or values is None else (block.tolist(), values.tolist())


def strided_slice(
    input: tf.Tensor,
    begin: Array,
    end: Array,
    strides: Array,
    begin_mask: int = 0,
    end_mask: int = 0,
    ellipsis_mask: int = 0,
    new_axis_mask: int = 0,
    shrink_axis_mask: int = 0,
    name: str | None = None,
) -> tf.Tensor | None:
    """`tf.strided_slice` with the indexed axes kept, then squeezed.

    Otherwise DTensor confuses which remaining axis is divided. `None` if no axis is indexed, or if indices aren't
    static.
    """
    if not shrink_axis_mask or ellipsis_mask or new_axis_mask:
        return None
    tensor, first, last = tf.convert_to_tensor(input), tf.get_static_value(begin), tf.get_static_value(end)
    if first is None or last is None or (tensor.shape.rank or 0) < 2:
        return None
    axes = [axis for axis in range(len(first)) if shrink_axis_mask >> axis & 1]
    # The index -1 has no end.
    end_mask |= sum(1 << axis for axis in axes if first[axis] == -1)
    last = [index + 1 if axis in axes else last[axis] for axis, index in enumerate(first)]
    return tf.squeeze(tf.strided_slice(tensor, first, last, strides, begin_mask, end_mask), axes)


def _permute(tensor: tf.Tensor, axis: int, reorder: Callable[[np.ndarray], np.ndarray]) -> tf.Tensor:
    """Permutes a tensor along an axis of static size; `reorder` gets its indices and returns them in the new order.

    The gradient gathers by the inverse permutation, where the gradient of `tf.gather` would scatter.
    """
    axis %= len(tensor.shape)
    order = reorder(np.arange(_static_sizes(tensor)[axis]))

    @tf.custom_gradient
    def permute(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _take(tensor, axis, order), lambda cotangent: _take(cotangent, axis, np.argsort(order))

    permuted: Any = permute(tensor)
    return permuted


def _take(tensor: tf.Tensor, axis: int, order: np.ndarray) -> tf.Tensor:
    """Gathers a tensor in another order along an axis; each device gets all rows first if it is the axis of rows."""
    exchange = axis == 0 and computing_on_mesh()
    local = relayout(tensor, (None,) * len(tensor.shape)) if exchange else pin_on_mesh(tensor)
    return pin_on_mesh(tf.gather(local, order.astype("int32"), axis=axis))


def average_pool_gradient(
    orig_input_shape: tf.Tensor,
    grad: tf.Tensor,
    ksize: Sequence[int],
    strides: Sequence[int],
    padding: str,
    data_format: str | None = None,
    name: str | None = None,
) -> tf.Tensor | None:
    """`tf.raw_ops.AvgPoolGrad` and `AvgPool3DGrad`, as a product with a matrix along each axis.

    The matrix has a row for each window, with the weight of each input in the window's mean.
    """
    shape: Any = tf.get_static_value(orig_input_shape)
    gradient = pin_on_mesh(grad)
    for axis, (size, window, stride) in enumerate(zip(shape, ksize, strides, strict=True)):
        if window == stride == 1:
            continue
        count = _static_sizes(grad)[axis]
        before = _padding(size, window, stride, count, padding)[0]
        inputs, starts = np.arange(size), np.arange(count)[:, np.newaxis] * stride - before
        inside = ((inputs >= starts) & (inputs < starts + window)).astype("float64")
        gradient = _multiply_along(gradient, axis, tf.constant(inside / inside.sum(1, keepdims=True), grad.dtype))
    return pin_on_mesh(gradient)


def depthwise_input_gradient(
    input_sizes: tf.Tensor,
    filter: tf.Tensor,
    out_backprop: tf.Tensor,
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> tf.Tensor | None:
    """`tf.raw_ops.DepthwiseConv2dNativeBackpropInput`, for which DTensor has no sharding rule, as a convolution of the
    cotangent with the flipped kernel; `None` with dilations.
    """
    if any(dilation != 1 for dilation in dilations):
        return None
    layout = _ChannelsLast(data_format)
    sizes, gradient = layout.order(tf.get_static_value(input_sizes)), pin_on_mesh(layout.to(out_backprop))
    height, width, channels, multiplier = _static_sizes(filter)
    paddings = [[0, 0]]
    for axis, (window, stride) in enumerate(zip((height, width), layout.order(strides)[1:3], strict=True), 1):
        output_size = _static_sizes(gradient)[axis]
        before = _padding(sizes[axis], window, stride, output_size, padding, layout.pair(explicit_paddings, axis))[0]
        dilated_size = (output_size - 1) * stride + 1
        if stride > 1:
            # Insert stride - 1 zeros between places by a matrix product, for which DTensor has a rule.
            gradient = _multiply_along(gradient, axis, tf.constant(np.eye(dilated_size)[::stride], gradient.dtype))
        paddings.append([window - 1 - before, int(sizes[axis]) - dilated_size + before])
    kernel = tf.reshape(filter, [height, width, channels * multiplier, 1])
    kernel = tf.gather(tf.gather(kernel, np.arange(height)[::-1], axis=0), np.arange(width)[::-1], axis=1)
    gradient = tf.nn.depthwise_conv2d(tf.pad(gradient, [*paddings, [0, 0]]), kernel, [1, 1, 1, 1], "VALID")
    if multiplier > 1:
        gradient = tf.reduce_sum(tf.reshape(gradient, [*gradient.shape[:3], channels, multiplier]), -1)
    return pin_on_mesh(layout.back(gradient))


def depthwise_filter_gradient(
    input: tf.Tensor,
    filter_sizes: tf.Tensor,
    out_backprop: tf.Tensor,
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> tf.Tensor | None:
    """`tf.raw_ops.DepthwiseConv2dNativeBackpropFilter`, as a sum over the inputs of each kernel weight.

    `None` with dilations.
    """
    if any(dilation != 1 for dilation in dilations):
        return None
    layout = _ChannelsLast(data_format)
    inputs, cotangent = pin_on_mesh(layout.to(input)), pin_on_mesh(layout.to(out_backprop))
    height, width, channels, multiplier = (int(size) for size in tf.get_static_value(filter_sizes))
    rows, out_height, out_width = _static_sizes(cotangent)[:3]
    both_strides = layout.order(strides)[1:3]
    paddings, dtype = [[0, 0]], tf.float64 if inputs.dtype == tf.float64 else tf.float32
    for axis, (window, stride) in enumerate(zip((height, width), both_strides, strict=True), 1):
        shape = _static_sizes(inputs)[axis], window, stride, _static_sizes(cotangent)[axis]
        paddings.append(_padding(*shape, padding, layout.pair(explicit_paddings, axis)))
    inputs = tf.expand_dims(tf.pad(tf.cast(inputs, dtype), [*paddings, [0, 0]]), -1)
    cotangent = tf.reshape(tf.cast(cotangent, dtype), [rows, out_height, out_width, channels, multiplier])
    sums = []
    for y in range(height):
        for x in range(width):
            ys, xs = (
                slice(i, i + (n - 1) * s + 1, s)
                for i, n, s in zip((y, x), (out_height, out_width), both_strides, strict=True)
            )
            sums.append(tf.reduce_sum(inputs[:, ys, xs] * cotangent, (1, 2)))
    # Sum over rows last, in a single collective.
    total = tf.reduce_sum(tf.stack(sums, 1), 0)
    return tf.cast(tf.reshape(total, [height, width, channels, multiplier]), out_backprop.dtype)


def _padding(
    size: int, window: int, stride: int, count: int, padding: str | bytes, explicit: Sequence[int] = ()
) -> list[int]:
    """The padding before and after an axis of `size` inputs, over which a window moves to `count` outputs."""
    padding = padding.decode() if isinstance(padding, bytes) else padding
    if padding == "EXPLICIT":
        return [int(pad) for pad in explicit]
    total = max((count - 1) * stride + window - int(size), 0) if padding == "SAME" else 0
    return [total // 2, total - total // 2]


def _multiply_along(tensor: tf.Tensor, axis: int, matrix: tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor with a matrix along an axis."""
    letters = "abcdef"[: len(tensor.shape)]
    return tf.einsum(f"{letters},{letters[axis]}z->{letters.replace(letters[axis], 'z')}", tensor, matrix)


class _ChannelsLast:
    """Wraps an operation: transposes its images to channels-last, and the result back."""

    def __init__(self, data_format: str | bytes):
        self._first = data_format in ("NCHW", b"NCHW")

    def order(self, values: Sequence[int]) -> list[int]:
        return [int(values[axis]) for axis in ((0, 2, 3, 1) if self._first else range(4))]

    def pair(self, pairs: Sequence[int], axis: int) -> Sequence[int]:
        axis = axis + 1 if self._first else axis
        return pairs[2 * axis : 2 * axis + 2]

    def to(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tensor, (0, 2, 3, 1)) if self._first else tensor

    def back(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tensor, (0, 3, 1, 2)) if self._first else tensor


EQUIVALENTS: tuple[tuple[ModuleType, str, Callable[..., tf.Tensor | None]], ...] = (
    (tf, "reverse", reverse),
    (array_ops, "reverse", reverse),
    (array_ops, "reverse_v2", reverse),
    (gen_manip_ops, "roll", roll),
    (gen_array_ops, "strided_slice", strided_slice),
    # Dilated convolutions consist of these two.
    (array_ops, "space_to_batch_nd", space_to_batch),
    (array_ops, "batch_to_space_nd", batch_to_space),
    (gen_nn_ops, "avg_pool_grad", average_pool_gradient),
    (gen_nn_ops, "avg_pool3d_grad", average_pool_gradient),
    (gen_nn_ops, "depthwise_conv2d_native_backprop_input", depthwise_input_gradient),
    (gen_nn_ops, "depthwise_conv2d_native_backprop_filter", depthwise_filter_gradient),
)


def _compute(
    equivalent: Callable[..., tf.Tensor | None], _: bool, plain: Callable[..., tf.Tensor], *args: Any, **kwargs: Any
) -> tf.Tensor:
    """Computes an equivalent on a mesh, and the plain operation elsewhere, or where the equivalent returns `None`."""
    result = equivalent(*args, **kwargs) if computing_on_mesh() else None
    return plain(*args, **kwargs) if result is None else result


_PATCH = ProcessPatch[bool](
    lambda: [Replacement(module, name, functools.partial(_compute, by)) for module, name, by in EQUIVALENTS]
)


def substituted_operations() -> contextlib.AbstractContextManager[object]:
    """Context in which this thread, tracing a step for a mesh, replaces these operations."""
    return _PATCH.open(True)
