"""im2col: the windows of an input that a convolution multiplies with its kernel.

A tap is a spatial position of the kernel.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Pixels of so few channels are gathered faster axis by axis, in longer pieces. With oneDNN on two cores, 128 images of
# 28x28x1 and windows of 8x8 with stride 2 took 0.9 ms, against 4.5 pixel by pixel and 2.1 by a convolution with an
# identity for a kernel; 32x32x3 and 5x5: 2.4 ms against 6.8 and 9.3; but 16x16x16 and 3x3: 1.4 ms against 1.0.
FEW_CHANNELS = 8


class Geometry(NamedTuple):
    """The geometry of a convolution's windows.

    Attributes:
        kernel_size: How many taps the kernel has along each axis.
        strides: The steps from one window to the next.
        dilation: The steps from one tap to the next.
        padding: `"same"`, `"valid"` or `"causal"`.
    """

    kernel_size: Sequence[int]
    strides: Sequence[int]
    dilation: Sequence[int]
    padding: str

    @classmethod
    def of(cls, layer: keras.layers.Layer) -> "Geometry":
        """The geometry of a convolution layer."""
        return cls(layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding)


def extract_windows(images: tf.Tensor, geometry: Geometry, outputs: Sequence[Any], by_xla: bool) -> tf.Tensor:
    """Extracts the values of every window.

    Args:
        images: The images, `(batch, *spatial, channels)`.
        geometry: Where the windows are.
        outputs: Number of windows along each axis.
        by_xla: Whether XLA compiles this. XLA slices fast and gathers slowly; without XLA it is the other way round.

    Returns:
        `(batch, positions, taps, channels)`; taps by the last axis first, as `(width, height)` of a kernel, unless
        `first_axis_first`.
    """
    taps = math.prod(geometry.kernel_size)
    channels: Any = images.shape[-1]
    in_order = first_axis_first(channels, by_xla)
    padded = pad_images(images, geometry, outputs)
    if by_xla:
        # With positions last, products over them read both factors in memory order. On two cores, 64 products of
        # 288x256 and 256x64 took 6 ms instead of 16. XLA folds the transpose into the product.
        channels_first = tf.transpose(padded, [0, padded.shape.rank - 1, *range(1, padded.shape.rank - 1)])
        patches = _slice_windows(channels_first, geometry, outputs, first=2, into=1, in_order=True)
        positions = math.prod(outputs) if all(isinstance(size, int) for size in outputs) else -1
        batch = -1 if positions != -1 else tf.shape(images)[0]
        return tf.transpose(tf.reshape(patches, [batch, taps, channels, positions]), [0, 3, 1, 2])
    if None in padded.shape[1:]:
        patches = _slice_windows(padded, geometry, outputs, first=1, into=1 + len(outputs), in_order=in_order)
    elif not in_order:
        patches = _gather_by_axis(padded, geometry, outputs)
    else:
        patches = _gather_windows(padded, geometry, outputs)
    if all(isinstance(size, int) for size in outputs):
        return tf.reshape(patches, [-1, math.prod(outputs), taps, channels])
    return tf.reshape(patches, [tf.shape(images)[0], -1, taps, channels])


def first_axis_first(channels: int, by_xla: bool) -> bool:
    """Whether `extract_windows` returns taps in the kernel's order; in `_gather_by_axis`, that would cost a copy."""
    return by_xla or channels > FEW_CHANNELS


def spatial_sizes(tensor: tf.Tensor) -> list[Any]:
    """The sizes of the axes between batch and channels, static where known."""
    dynamic = tf.shape(tensor)
    return [
        dynamic[axis] if tensor.shape[axis] is None else tensor.shape[axis] for axis in range(1, tensor.shape.rank - 1)
    ]


def to_channels_last(tensor: tf.Tensor, layer: keras.layers.Layer) -> tf.Tensor:
    """A layer's input or output with channels last, as TensorFlow convolves on CPUs."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


def _slice_windows(
    padded: tf.Tensor, geometry: Geometry, outputs: Sequence[Any], first: int, into: int, in_order: bool
) -> tf.Tensor:
    """Extracts windows by slicing along one axis after the other.

    Args:
        padded: The padded images.
        geometry: Where the windows are.
        outputs: Number of windows along each axis.
        first: The first spatial axis of `padded`.
        into: The axis before which the taps are put.
        in_order: Whether the taps come in the kernel's order, or the last axis first.
    """
    patches = padded
    for axis in range(len(outputs)):
        taps, stride, dilation, count = (values[axis] for values in (*geometry[:3], outputs))
        # Taps of earlier axes may have been inserted before this one.
        current = first + axis + (axis if into < first else 0)
        starts = [tap * dilation for tap in range(taps)]
        ranges = [slice(start, start + (count - 1) * stride + 1, stride) for start in starts]
        slices = [patches[(slice(None),) * current + (positions,)] for positions in ranges]
        patches = tf.stack(slices, axis=into + (axis if in_order else 0))
    return patches


def _gather_windows(padded: tf.Tensor, geometry: Geometry, outputs: Sequence[int]) -> tf.Tensor:
    """The windows `(batch, positions, taps, channels)`, gathered by pixel index."""
    shape: Any = padded.shape
    pixel_indices = np.arange(math.prod(shape[1:-1])).reshape(shape[1:-1])
    taps = itertools.product(*map(range, geometry.kernel_size))
    indices = [pixel_indices[_tap_slices(tap, geometry, outputs)].ravel() for tap in taps]
    pixels = tf.reshape(padded, [-1, pixel_indices.size, shape[-1]])
    return tf.gather(pixels, np.stack(indices, -1).astype("int32"), axis=1)


def _gather_by_axis(padded: tf.Tensor, geometry: Geometry, outputs: Sequence[int]) -> tf.Tensor:
    """The windows `(batch x positions, taps x channels)`, gathered along one axis after the other.

    `width` is the entries gathered for a position: first its channels, then times the taps along each axis.
    """
    shape: Any = padded.shape
    patches, width = padded, shape[-1]
    for axis, (taps, stride, dilation, count) in enumerate(zip(*geometry[:3], outputs, strict=True)):
        size, others = shape[1 + axis], math.prod(shape[2 + axis : -1])
        # Pixels that are in the same windows are gathered as one piece.
        piece = math.gcd(stride, taps) if dilation == 1 else 1
        piece = piece if size % piece == 0 else 1
        starts = np.add.outer(np.arange(count) * stride, np.arange(0, taps, piece) * dilation) // piece
        pieces = tf.reshape(patches, [-1, size // piece, piece * others * width])
        patches = tf.gather(pieces, starts.astype("int32"), axis=1)
        # Moves this axis's taps behind the axes that are still to be gathered.
        patches = tf.transpose(tf.reshape(patches, [-1, taps, others, width]), [0, 2, 1, 3])
        width *= taps
    return patches


def _tap_slices(tap: Sequence[int], geometry: Geometry, outputs: Sequence[int]) -> tuple[slice, ...]:
    """The slices that hold one kernel tap of all windows."""
    starts = [index * step for index, step in zip(tap, geometry.dilation, strict=True)]
    axes = zip(starts, outputs, geometry.strides, strict=True)
    return tuple(slice(start, start + (size - 1) * stride + 1, stride) for start, size, stride in axes)


def pad_images(images: tf.Tensor, geometry: Geometry, outputs: Sequence[Any]) -> tf.Tensor:
    """Pads images with the zeros that the windows reach; keeps what lies beyond the last window."""
    paddings = []
    for size, out, taps, stride, dilation in zip(
        spatial_sizes(images), outputs, geometry.kernel_size, geometry.strides, geometry.dilation, strict=True
    ):
        missing = _clip_at_zero((out - 1) * stride + (taps - 1) * dilation + 1 - size)
        # Causal padding goes before the input, even where the last window ends before the input does.
        before = (taps - 1) * dilation if geometry.padding == "causal" else missing // 2
        paddings.append([before, _clip_at_zero(missing - before)])
    if all(isinstance(size, int) and size == 0 for pair in paddings for size in pair):
        return images
    shape: Any = images.shape
    if None in shape[1:]:
        return tf.pad(images, [[0, 0], *paddings, [0, 0]])
    # TensorFlow copies longer pieces faster.
    _, *others, width, channels = shape
    *axes, (before, after) = paddings
    rows = tf.reshape(images, [-1, *others, width * channels])
    padded = tf.pad(rows, [[0, 0], *axes, [before * channels, after * channels]])
    return tf.reshape(padded, [-1, *padded.shape[1:-1], before + width + after, channels])


def _clip_at_zero(size: Any) -> Any:
    return max(size, 0) if isinstance(size, int) else tf.maximum(size, 0)
