"""Convolutions: a dense layer on every window."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, register_rule
from keras_paragrad.per_example.rules import folded
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
        return kernel_gradient(layer, call.input, cotangent)

    fold = staticmethod(folded.grouped)

    def folded(self, calls: Sequence[Call]) -> tf.Tensor | None:
        (call, *others), layer = calls, calls[0].layer
        if others or not self.folds(call):
            return None
        if call.gradients is None:
            call.gradients = [self.fold(call.input, call.cotangent, Geometry.of(layer), layer.kernel.shape)]
        return call.gradients[0]

    def folded_squared_norms(self, calls: Sequence[Call]) -> tf.Tensor | None:
        (call, *others), layer = calls, calls[0].layer
        if others or not call.beside_plain or call.gradients is not None or not self.folds(call):
            return super().folded_squared_norms(calls)
        # Nothing but the norms is wanted of the gradients.
        return folded.grouped_squared_norms(call.input, call.cotangent, Geometry.of(layer), layer.kernel.shape)

    def folds(self, call: Call) -> bool:
        """Whether the batch is folded into the channels."""
        can = folded.suits(call) and max(call.layer.dilation_rate) == 1
        return can and self.costs_less_folded(call) and folded.has_grouped_gradients()

    def costs_less_folded(self, call: Call) -> bool:
        """Whether folding moves less than laying out the windows does, or ghost norms."""
        shape: Any = call.layer.kernel.shape
        positions, pixels = (tensor.shape[1:-1].num_elements() for tensor in (call.cotangent, call.input))
        if positions is None or pixels is None:
            return False
        rows, columns = math.prod(shape[:-1]), shape[-1]
        is_ghost = positions * (rows + columns) <= rows * columns
        # With oneDNN on one thread, in milliseconds, folded and laid out: 64 examples of 32x32x16 and 3x3 taps 4.2 and
        # 11.9; 32x32x32 and 7x7 with stride 2 16.5 and 39; 16x16x64 and 3x3 12.5 and 16.2; 32x32x32 and 3x3 with
        # stride 2 5.5 and 5.7; but 8x8x64 and 3x3 4.4 and 3.3; 16 of 8x8x256 and 3x3 30 and 11.8.
        windows = positions * rows * call.layer.groups
        folded_sides = pixels * call.input.shape[-1] + positions * columns
        return not is_ghost and math.prod(shape[:-2]) > 1 and 2 * windows > folded_sides + 4 * rows * columns


@register_rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseRule(ConvolutionRule):
    """As many groups as channels."""

    def groups(self, layer: Any, inputs: Any) -> int:
        return inputs.shape[-1]

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        return Convolutional.kernel_sum(self, call, weights)

    fold = staticmethod(folded.depthwise)

    def folded_squared_norms(self, calls: Sequence[Call]) -> tf.Tensor | None:
        return Convolutional.folded_squared_norms(self, calls)

    def folds(self, call: Call) -> bool:
        # As products they have one column for each channel, in which a matrix product has nothing to reuse.
        return folded.suits(call)


def kernel_gradient(layer: Any, inputs: tf.Tensor, cotangent: tf.Tensor) -> tf.Tensor:
    """The gradient of a batch for the kernel of a convolution layer, whatever the kernel is."""
    kernel = tf.zeros(layer.kernel.shape, inputs.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(kernel)
        # Its result is not used, so only the gradient is computed.
        outputs = keras.ops.conv(inputs, kernel, layer.strides, layer.padding, layer.data_format, layer.dilation_rate)
    (gradient,) = tape.gradient(outputs, [kernel], output_gradients=[cotangent])
    return tf.convert_to_tensor(gradient)


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
