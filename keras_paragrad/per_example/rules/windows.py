"""The parts of an input that a convolution multiplies with its kernel, laid out side by side."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# Up to so many values a window, a convolution with an identity for a kernel copies them fastest: for 128 images of
# 28x28x1 and a kernel of 8x8 with stride 2, 0.8 ms against 2.7 (extract_patches) and 7.7 (slices) on two CPU cores.
FEW_VALUES = 64


class Geometry(NamedTuple):
    """Where a convolution's windows lie.

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
    def of(cls, layer: Any) -> "Geometry":
        """A convolution layer's."""
        return cls(layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding)


def windows(images: tf.Tensor, geometry: Geometry, outputs: Sequence[Any]) -> tf.Tensor:
    """Every window's values.

    Args:
        images: What the windows lie on, `(batch, *spatial, channels)`.
        geometry: Where.
        outputs: How many windows there are along each axis.

    Returns:
        `(batch, positions, taps, channels)`.
    """
    taps = math.prod(geometry.kernel_size)
    channels: Any = images.shape[-1]
    padded = _padded(images, geometry, outputs)
    if taps * channels <= FEW_VALUES:
        identity = tf.reshape(tf.eye(taps * channels, dtype=images.dtype), [*geometry.kernel_size, channels, -1])
        found = tf.nn.convolution(padded, identity, geometry.strides, "VALID", dilations=geometry.dilation)
    elif len(outputs) == 2 and max(geometry.strides) > 1:
        # Slices with strides are slow outside of XLA: 3.3 ms against 0.7 for 128 images of 13x13x16, a kernel of 4x4.
        sizes, strides, rates = ([1, *steps, 1] for steps in geometry[:3])
        found = tf.image.extract_patches(padded, sizes, strides, rates, "VALID")
    else:
        found = tf.stack([_slice(padded, tap, geometry, outputs) for tap in _taps(geometry)], axis=-2)
    if all(isinstance(size, int) for size in outputs):
        return tf.reshape(found, [-1, math.prod(outputs), taps, channels])
    return tf.reshape(found, [tf.shape(images)[0], -1, taps, channels])


def spatial(tensor: tf.Tensor) -> list[Any]:
    """The sizes of the axes between batch and channels, numbers where they are known."""
    dynamic = tf.shape(tensor)
    return [
        dynamic[axis] if tensor.shape[axis] is None else tensor.shape[axis] for axis in range(1, tensor.shape.rank - 1)
    ]


def channels_last(tensor: tf.Tensor, layer: Any) -> tf.Tensor:
    """A layer's input or output, in the order in which TensorFlow convolves on CPUs."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


def _taps(geometry: Geometry) -> Any:
    return itertools.product(*map(range, geometry.kernel_size))


def _slice(padded: tf.Tensor, tap: Sequence[int], geometry: Geometry, outputs: Sequence[Any]) -> tf.Tensor:
    starts = [place * step for place, step in zip(tap, geometry.dilation, strict=True)]
    ranges = [
        slice(start, start + (size - 1) * stride + 1, stride)
        for start, stride, size in zip(starts, geometry.strides, outputs, strict=True)
    ]
    return padded[(slice(None), *ranges)]


def _padded(images: tf.Tensor, geometry: Geometry, outputs: Sequence[Any]) -> tf.Tensor:
    """With the zeros around it that the windows reach, cut to where they end."""
    paddings = []
    for size, out, taps, stride, dilation in zip(
        spatial(images), outputs, geometry.kernel_size, geometry.strides, geometry.dilation, strict=True
    ):
        missing = (out - 1) * stride + (taps - 1) * dilation + 1 - size
        missing = max(missing, 0) if isinstance(missing, int) else tf.maximum(missing, 0)
        before = missing // 2 if geometry.padding == "same" else missing
        paddings.append([before, missing - before])
    if all(pair == [0, 0] for pair in paddings):
        return images
    return tf.pad(images, [[0, 0], *paddings, [0, 0]])
