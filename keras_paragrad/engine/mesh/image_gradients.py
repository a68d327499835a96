"""Gradients that DTensor has no rule for, of average pools and depthwise convolutions, by what it has rules for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.engine.mesh.pinning import pinned_in_steps

_UNIT = [1, 1, 1, 1]


def average_pool_gradient(
    orig_input_shape: Any,
    grad: Any,
    ksize: Sequence[int],
    strides: Sequence[int],
    padding: str,
    data_format: str | None = None,
    name: str | None = None,
) -> Any:
    """`tf.raw_ops.AvgPoolGrad` and `AvgPool3DGrad`: along each axis, a product with what places get of windows."""
    shape, found = tf.get_static_value(orig_input_shape), pinned_in_steps(grad)
    for axis, (size, window, stride) in enumerate(zip(shape, ksize, strides, strict=True)):
        if window == stride == 1:
            continue
        count = int(grad.shape[axis])
        before = _padding(size, window, stride, count, padding)[0]
        places, first = np.arange(size), np.arange(count)[:, np.newaxis] * stride - before
        inside = ((places >= first) & (places < first + window)).astype("float64")
        shares = tf.constant(inside / inside.sum(1, keepdims=True), grad.dtype)
        found = _along(found, axis, shares)
    return pinned_in_steps(found)


def depthwise_input_gradient(
    input_sizes: Any,
    filter: Any,
    out_backprop: Any,
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """`tf.raw_ops.DepthwiseConv2dNativeBackpropInput`: a convolution of the cotangent with the flipped kernel.

    `None` with dilations.
    """
    if any(each != 1 for each in dilations):
        return None
    last = _channels_last(data_format)
    sizes, found = last.of(tf.get_static_value(input_sizes)), pinned_in_steps(last(out_backprop))
    height, width, channels, multiplier = filter.shape
    paddings = [[0, 0]]
    for axis, (window, stride) in enumerate(zip((height, width), last.of(strides)[1:3], strict=True), 1):
        count = int(found.shape[axis])
        before = _padding(sizes[axis], window, stride, count, padding, last.pair(explicit_paddings, axis))[0]
        spread = (count - 1) * stride + 1
        if stride > 1:
            found = _along(found, axis, tf.constant(np.eye(spread)[::stride], found.dtype))
        paddings.append([window - 1 - before, int(sizes[axis]) - spread + before])
    kernel = tf.reshape(filter, [height, width, channels * multiplier, 1])
    kernel = tf.gather(tf.gather(kernel, np.arange(height)[::-1], axis=0), np.arange(width)[::-1], axis=1)
    found = tf.nn.depthwise_conv2d(tf.pad(found, [*paddings, [0, 0]]), kernel, _UNIT, "VALID")
    if multiplier > 1:
        found = tf.reduce_sum(tf.reshape(found, [*found.shape[:3], channels, multiplier]), -1)
    return pinned_in_steps(last.back(found))


def depthwise_filter_gradient(
    input: Any,
    filter_sizes: Any,
    out_backprop: Any,
    strides: Sequence[int],
    padding: str,
    explicit_paddings: Sequence[int] = (),
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """`tf.raw_ops.DepthwiseConv2dNativeBackpropFilter`: for each place of the kernel, what it was multiplied with.

    `None` with dilations.
    """
    if any(each != 1 for each in dilations):
        return None
    last = _channels_last(data_format)
    given, cotangent = pinned_in_steps(last(input)), pinned_in_steps(last(out_backprop))
    height, width, channels, multiplier = (int(size) for size in tf.get_static_value(filter_sizes))
    rows, down, along = cotangent.shape[:3]
    steps = last.of(strides)[1:3]
    paddings, dtype = [[0, 0]], tf.float64 if given.dtype == tf.float64 else tf.float32
    for axis, (window, stride) in enumerate(zip((height, width), steps, strict=True), 1):
        shape = given.shape[axis], window, stride, int(cotangent.shape[axis])
        paddings.append(_padding(*shape, padding, last.pair(explicit_paddings, axis)))
    given = tf.expand_dims(tf.pad(tf.cast(given, dtype), [*paddings, [0, 0]]), -1)
    cotangent = tf.reshape(tf.cast(cotangent, dtype), [rows, down, along, channels, multiplier])
    found = []
    for y in range(height):
        for x in range(width):
            met = given[:, y : y + (down - 1) * steps[0] + 1 : steps[0], x : x + (along - 1) * steps[1] + 1 : steps[1]]
            found.append(tf.reduce_sum(met * cotangent, (1, 2)))
    # Rows are added up last, so that devices do it together once.
    total = tf.reduce_sum(tf.stack(found, 1), 0)
    return tf.cast(tf.reshape(total, [height, width, channels, multiplier]), out_backprop.dtype)


def _padding(
    size: int, window: int, stride: int, count: int, padding: str | bytes, explicit: Sequence[int] = ()
) -> list[int]:
    padding = padding.decode() if isinstance(padding, bytes) else padding
    if padding == "EXPLICIT":
        return [int(each) for each in explicit]
    total = max((count - 1) * stride + window - int(size), 0) if padding == "SAME" else 0
    return [total // 2, total - total // 2]


def _along(tensor: Any, axis: int, matrix: Any) -> Any:
    """A tensor multiplied with a matrix along an axis."""
    letters = "abcdef"[: len(tensor.shape)]
    return tf.einsum(f"{letters},{letters[axis]}z->{letters.replace(letters[axis], 'z')}", tensor, matrix)


class _Layout:
    """Takes images to where channels come last, and back."""

    def __init__(self, channels_first: bool):
        self._first = channels_first

    def of(self, each: Sequence[int]) -> list[int]:
        return [int(each[place]) for place in ((0, 2, 3, 1) if self._first else range(4))]

    def pair(self, pairs: Sequence[int], axis: int) -> Sequence[int]:
        place = axis + 1 if self._first else axis
        return pairs[2 * place : 2 * place + 2]

    def __call__(self, tensor: Any) -> Any:
        return tf.transpose(tensor, (0, 2, 3, 1)) if self._first else tensor

    def back(self, tensor: Any) -> Any:
        return tf.transpose(tensor, (0, 3, 1, 2)) if self._first else tensor


def _channels_last(data_format: Any) -> _Layout:
    return _Layout(data_format in ("NCHW", b"NCHW"))
