"""Convolutions: a dense layer on every window."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened
from keras_paragrad.per_example.rules.windows import Geometry, channels_last, first_axis_first, spatial, windows


class Convolutional(Linear):
    """What convolutions of all kinds share.

    Rochette et al., https://arxiv.org/abs/1912.06015, and Lee and Kifer, https://arxiv.org/abs/2009.03106.
    """

    def broadcast_bias(self, layer: Any, rank: int) -> Sequence[int]:
        return convolution_bias(layer, rank)


@register_rule(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
class ConvolutionRule(Convolutional):
    """Positions are windows; rows are the taps and input channels of a group's windows."""

    def product(self, call: Call) -> Product:
        layer: Any = call.layer
        inputs, cotangent = channels_last(call.input, layer), channels_last(call.cotangent, layer)
        return grouped_product(inputs, cotangent, Geometry.of(layer), self.groups(layer, inputs), call.by_xla)

    def columns(self, call: Call) -> list[int]:
        layer: Any = call.layer
        return [call.cotangent.shape.rank - 1 if layer.data_format == "channels_last" else 1]

    def groups(self, layer: Any, inputs: tf.Tensor) -> int:
        """How many groups of channels are convolved on their own."""
        return layer.groups

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return grouped_kernel(layer.kernel.shape, product, by_xla)

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        layer: Any = call.layer
        if layer.padding == "causal":
            return super().kernel_sum(call, weights)
        cotangent = call.cotangent * tf.reshape(weights, [-1, *[1] * (call.cotangent.shape.rank - 1)])
        kernel = tf.zeros(layer.kernel.shape, call.input.dtype)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(kernel)
            # Its result is not used, so only the gradient is computed.
            outputs = keras.ops.conv(
                call.input, kernel, layer.strides, layer.padding, layer.data_format, layer.dilation_rate
            )
        (total,) = tape.gradient(outputs, [kernel], output_gradients=[cotangent])
        return tf.convert_to_tensor(total)


@register_rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseRule(ConvolutionRule):
    """As many groups as channels."""

    def groups(self, layer: Any, inputs: Any) -> int:
        return inputs.shape[-1]

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        return Convolutional.kernel_sum(self, call, weights)


def grouped_product(inputs: tf.Tensor, cotangent: tf.Tensor, geometry: Geometry, groups: int, by_xla: bool) -> Product:
    """The gradient of a convolution's kernel; both tensors have their channels last."""
    found = windows(inputs, geometry, spatial(cotangent), by_xla)
    return Product(_grouped(found, groups), _grouped(flat(cotangent)[:, :, tf.newaxis], groups))


def grouped_kernel(shape: tf.TensorShape, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
    """A kernel's gradient `(..., groups, taps x channels, columns)` in its own shape, after the leading axes."""
    leading = [-1] if product.shape.rank == 4 else []
    sizes: Any = product.shape[-3:]
    groups, rows, columns = sizes
    taps: Any = list(shape[:-2])
    channels = rows // math.prod(taps)
    step = 1 if first_axis_first(groups * channels, by_xla) else -1
    if groups == 1 and (step == 1 or len(taps) == 1):
        return tf.reshape(product, [*leading, *shape])
    apart = tf.reshape(product, [*leading, groups, *taps[::step], channels, columns])
    group, *axes, channel, column = range(len(leading), apart.shape.rank)
    in_order = tf.transpose(apart, [*range(len(leading)), *axes[::step], channel, group, column])
    return tf.reshape(in_order, [*leading, *shape])


def convolution_bias(layer: Any, rank: int) -> Sequence[int]:
    """The shape in which a convolution layer adds its bias to outputs of so many axes."""
    size = layer.bias.shape[0]
    return [1] * (rank - 1) + [size] if layer.data_format == "channels_last" else [1, size] + [1] * (rank - 2)


def flat(tensor: tf.Tensor) -> tf.Tensor:
    """`(batch, *spatial, channels)` as `(batch, positions, channels)`."""
    return flattened(tensor, 1, tensor.shape.rank - 1)


def _grouped(found: tf.Tensor, groups: int) -> tf.Tensor:
    """`(batch, positions, taps, channels)` as `(batch, groups, positions, taps x channels of a group)`."""
    if groups == 1:
        return flattened(found, 2, 4)[:, tf.newaxis]
    shape: Any = found.shape
    dynamic = tf.shape(found)
    positions = dynamic[1] if shape[1] is None else shape[1]
    apart = tf.reshape(found, [dynamic[0], positions, shape[2], groups, shape[3] // groups])
    return flattened(tf.transpose(apart, [0, 3, 1, 2, 4]), 3, 5)
