"""Windows of a convolution, laid out in each of the ways, against slices taken one by one."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.per_example.rules.windows import FEW_CHANNELS, Geometry, extract_windows, first_axis_first

GEOMETRIES = {
    "one axis": ((11,), Geometry((3,), (2,), (1,), "valid")),
    "causal": ((9,), Geometry((3,), (1,), (2,), "causal")),
    "strides in the taps": ((12, 9), Geometry((4, 3), (2, 3), (1, 1), "same")),
    "strides not in the size": ((11, 10), Geometry((4, 3), (2, 3), (1, 1), "valid")),
    "dilated": ((10, 11), Geometry((2, 3), (1, 1), (3, 2), "same")),
    "three axes": ((5, 6, 7), Geometry((2, 3, 4), (1, 1, 2), (1, 1, 1), "valid")),
}
WAYS = {
    "gathered by axis": {"channels": 2},
    "gathered by pixel": {"channels": FEW_CHANNELS + 1},
    "sliced for XLA": {"channels": 2, "by_xla": True},
}


def paddings_of(sizes, geometry):
    """By axis, how many zeros a convolution puts before and after an input."""
    for size, taps, stride, dilation in zip(sizes, *geometry[:3], strict=True):
        reach = (taps - 1) * dilation
        missing = max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)
        yield {"valid": (0, 0), "causal": (reach, 0), "same": (missing // 2, missing - missing // 2)}[geometry.padding]


def one_by_one(images, geometry, in_order):
    """The windows, and how many there are along each axis."""
    padded = np.pad(images, [(0, 0), *paddings_of(images.shape[1:-1], geometry), (0, 0)])
    reaches = [
        (taps - 1) * dilation + 1 for taps, dilation in zip(geometry.kernel_size, geometry.dilation, strict=True)
    ]
    sizes = zip(padded.shape[1:-1], reaches, geometry.strides, strict=True)
    outputs = [(size - reach) // stride + 1 for size, reach, stride in sizes]
    found = []
    for place in itertools.product(*map(range, outputs)):
        starts = [at * stride for at, stride in zip(place, geometry.strides, strict=True)]
        cuts = zip(starts, reaches, geometry.dilation, strict=True)
        window = padded[(slice(None), *(slice(at, at + reach, dilation) for at, reach, dilation in cuts))]
        axes = range(1, window.ndim - 1)
        taps = axes if in_order else axes[::-1]
        found.append(window.transpose(0, *taps, window.ndim - 1).reshape(len(images), -1, images.shape[-1]))
    return np.stack(found, 1), outputs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_windows_are_the_slices(name, way):
    sizes, geometry = GEOMETRIES[name]
    channels, by_xla = WAYS[way]["channels"], WAYS[way].get("by_xla", False)
    images = np.random.default_rng(0).normal(size=(2, *sizes, channels)).astype("float32")
    expected, outputs = one_by_one(images, geometry, first_axis_first(channels, by_xla))
    np.testing.assert_array_equal(extract_windows(tf.constant(images), geometry, outputs, by_xla), expected)


@pytest.mark.parametrize("channels", [2, FEW_CHANNELS + 1])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_windows_on_images_of_any_size(name, channels):
    sizes, geometry = GEOMETRIES[name]
    images = np.random.default_rng(0).normal(size=(2, *sizes, channels)).astype("float32")
    expected, outputs = one_by_one(images, geometry, first_axis_first(channels, False))
    of_any_size = tf.TensorSpec([None] * (1 + len(sizes)) + [channels])
    laid_out = tf.function(
        lambda x: extract_windows(x, geometry, tuple(map(tf.constant, outputs)), False), autograph=False
    )
    np.testing.assert_array_equal(laid_out.get_concrete_function(of_any_size)(tf.constant(images)), expected)
