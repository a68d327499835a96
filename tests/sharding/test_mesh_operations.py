"""What a mesh computes in place of operations that DTensor has no rule for is what these give."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.engine.mesh.equivalents import (
    average_pool_gradient,
    batch_to_space,
    depthwise_filter_gradient,
    depthwise_input_gradient,
    reverse,
    roll,
    space_to_batch,
    strided_slice,
)

CLOSE = 1e-6
PADDINGS = ["SAME", "VALID"]


def drawn(*shape):
    return tf.constant(np.random.default_rng(len(shape)).normal(size=shape).astype("float32"))


def apart(found, expected):
    assert found.shape == expected.shape
    return float(tf.reduce_max(tf.abs(found - expected)) / tf.reduce_max(tf.abs(expected)))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("size", [(7, 6), (5, 5, 4)], ids=str)
def test_gradients_of_average_pools(size, padding):
    inputs = drawn(2, *size, 3)
    pool, gradient = {2: (tf.nn.avg_pool2d, tf.raw_ops.AvgPoolGrad), 3: (tf.nn.avg_pool3d, tf.raw_ops.AvgPool3DGrad)}[
        len(size)
    ]
    for window, stride in itertools.product((1, 2, 3), (1, 2)):
        # Windows and strides that differ by axis.
        ksize, strides = [1, window, *[2] * (len(size) - 1), 1], [1, *[1] * (len(size) - 1), stride, 1]
        cotangent = drawn(*pool(inputs, ksize, strides, padding).shape)
        given = {"grad": cotangent, "ksize": ksize, "strides": strides, "padding": padding}
        expected = gradient(orig_input_shape=inputs.shape, **given)
        assert apart(average_pool_gradient(tf.shape(inputs), **given), expected) <= CLOSE, ksize


@pytest.mark.parametrize("padding", [*PADDINGS, "EXPLICIT"])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_gradients_of_depthwise_convolutions(padding, multiplier):
    for size, kernel, stride in itertools.product((7, 8), (1, 2, 3), (1, 2)):
        inputs, weights = drawn(2, size, size + 1, 3), drawn(kernel, kernel + 1, 3, multiplier)
        how = {"strides": [1, stride, stride, 1], "padding": padding}
        how["explicit_paddings"] = [0, 0, 0, kernel - 1, 1, 0, 0, 0] if padding == "EXPLICIT" else []
        made = tf.raw_ops.DepthwiseConv2dNative(input=inputs, filter=weights, **how)
        cotangent = drawn(*made.shape)
        both = {"out_backprop": cotangent, **how}
        expected = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(input_sizes=inputs.shape, filter=weights, **both)
        found = depthwise_input_gradient(tf.shape(inputs), weights, **both)
        assert apart(found, expected) <= CLOSE, (size, kernel, stride)
        expected = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(input=inputs, filter_sizes=weights.shape, **both)
        found = depthwise_filter_gradient(inputs, tf.shape(weights), **both)
        assert apart(found, expected) <= CLOSE, (size, kernel, stride)


def test_channels_that_come_first():
    # The CPU computes convolutions only where they come last.
    inputs, weights, how = drawn(2, 6, 7, 3), drawn(3, 2, 3, 2), {"strides": [1, 1, 1, 1], "padding": "SAME"}
    cotangent = drawn(2, 6, 7, 6)
    first = {"out_backprop": tf.transpose(cotangent, (0, 3, 1, 2)), "data_format": "NCHW", **how}
    expected = tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
        input_sizes=inputs.shape, filter=weights, out_backprop=cotangent, **how
    )
    found = depthwise_input_gradient(tf.constant([2, 3, 6, 7]), weights, **first)
    assert apart(tf.transpose(found, (0, 2, 3, 1)), expected) <= CLOSE
    expected = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=inputs, filter_sizes=weights.shape, out_backprop=cotangent, **how
    )
    found = depthwise_filter_gradient(tf.transpose(inputs, (0, 3, 1, 2)), tf.shape(weights), **first)
    assert apart(found, expected) <= CLOSE


def test_other_orders_of_places():
    inputs, weights = drawn(4, 5, 6), drawn(4, 5, 6)

    def with_gradient(change):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            changed = change(inputs)
            loss = tf.reduce_sum(changed * weights)
        return changed, tape.gradient(loss, inputs)

    for axes in ([0], [1, -1], [0, 1, 2]):
        for found, expected in zip(
            with_gradient(lambda each, axes=axes: reverse(each, axes)),
            with_gradient(lambda each, axes=axes: tf.reverse(each, axes)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
    for shift, axis in ((2, 1), ([1, -2], [0, 2]), ([3, 1], [1, 1])):
        for found, expected in zip(
            with_gradient(lambda each, shift=shift, axis=axis: roll(each, shift, axis)),
            with_gradient(lambda each, shift=shift, axis=axis: tf.roll(each, shift, axis)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("padding", PADDINGS)
def test_dilated_convolutions(padding):
    inputs = drawn(2, 7, 8, 3)
    for dilations in ([2, 3], [1, 2]):
        kernel = drawn(2, 3, 3, 4)
        block, base = tf.constant(dilations), [0, 0]
        if padding == "SAME":
            base = [(size - 1) * each for size, each in zip(kernel.shape[:2], dilations, strict=True)]
        paddings, crops = tf.required_space_to_batch_paddings(
            inputs.shape[1:3], block, [[each // 2, each - each // 2] for each in base]
        )
        divided = tf.nn.conv2d(space_to_batch(inputs, block, paddings), kernel, 1, "VALID")
        found = batch_to_space(divided, block, crops)
        assert apart(found, tf.nn.convolution(inputs, kernel, padding=padding, dilations=dilations)) <= CLOSE


def test_places_of_axes():
    inputs = drawn(4, 5, 6)
    for begin, end, mask in (([1, 0, 0], [2, 5, 6], 1), ([0, -1, 1], [4, 0, 5], 2), ([-1, 2, -1], [0, 3, 0], 7)):
        given = {"begin": begin, "end": end, "strides": [1, 1, 1], "shrink_axis_mask": mask}
        np.testing.assert_array_equal(strided_slice(inputs, **given), tf.raw_ops.StridedSlice(input=inputs, **given))
    assert strided_slice(inputs, [0], [2], [1]) is None
    array = inputs.numpy()
    np.testing.assert_array_equal(strided_slice(array, [1], [2], [1], shrink_axis_mask=1), array[1])
