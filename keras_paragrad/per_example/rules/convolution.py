"""Convolutions: a dense layer on every window."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened
from keras_paragrad.per_example.rules.windows import Geometry, channels_last, first_axis_first, spatial, windows

# An example's input and a kernel to its output.
Convolve = Callable[[tf.Tensor, tf.Tensor], Any]
# Numbers in an example's windows. With oneDNN on one core, for 64 examples: 147 thousand took 12.6 ms to lay out and
# multiply, and 8.4 in a loop; 200 thousand 16.2 and 7.5; 803 thousand, for 16 examples, 26.5 and 15.1; but 73 thousand
# 11.7 and 13.8.
LARGE_WINDOWS = 100_000


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
        return kernel_gradient(functools.partial(self.convolve, layer), layer.kernel.shape, call.input, cotangent)

    def convolve(self, layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """What the layer does with a kernel, but for `"causal"` padding."""
        return keras.ops.conv(inputs, kernel, layer.strides, layer.padding, layer.data_format, layer.dilation_rate)

    def one_by_one(self, calls: Sequence[Call]) -> tf.Tensor | None:
        (call, *others), layer = calls, calls[0].layer
        if others or not loops(call) or not self.has_large_windows(layer, call.cotangent):
            return None
        if call.gradients is None:
            convolve = functools.partial(self.convolve, layer)
            call.gradients = [kernel_gradients(convolve, layer.kernel.shape, call.input, call.cotangent)]
        return call.gradients[0]

    def has_large_windows(self, layer: Any, cotangent: tf.Tensor) -> bool:
        """Whether an example's windows are so many numbers that to lay them out takes longer than a loop's turn."""
        positions, rows = cotangent.shape[1:-1].num_elements(), layer.kernel.shape[:-1].num_elements()
        columns = layer.kernel.shape[-1]
        if positions is None or layer.groups != 1:
            return False
        is_ghost = positions * (rows + columns) <= rows * columns
        return not is_ghost and positions * rows >= LARGE_WINDOWS


@register_rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseRule(ConvolutionRule):
    """As many groups as channels."""

    def groups(self, layer: Any, inputs: Any) -> int:
        return inputs.shape[-1]

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        return Convolutional.kernel_sum(self, call, weights)

    def convolve(self, layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return depthwise(layer, inputs, kernel)

    def has_large_windows(self, layer: Any, cotangent: tf.Tensor) -> bool:
        # As products they have one column for each channel, in which a matrix product has nothing to reuse.
        return True


def depthwise(layer: Any, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """A depthwise convolution with a layer's geometry."""
    return keras.ops.depthwise_conv(
        inputs, kernel, layer.strides, layer.padding, layer.data_format, layer.dilation_rate
    )


def loops(call: Call) -> bool:
    """Whether TensorFlow runs a loop over the examples of a call about as fast as its turns, as it does on CPUs.

    XLA runs convolutions in loops many times slower, and for GPUs they are too small one by one.
    """
    layer: Any = call.layer
    plain = layer.data_format == "channels_last" and layer.padding != "causal"
    return plain and not call.by_xla and not tf.config.list_logical_devices("GPU")


def kernel_gradients(convolve: Convolve, shape: Any, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
    """Each example's gradient for the kernel of a convolution, `(batch, *shape)`, one after the other."""

    def of_one(rows: Sequence[tf.Tensor]) -> tf.Tensor:
        row, cotangent = rows
        return kernel_gradient(convolve, shape, row[tf.newaxis], cotangent[tf.newaxis])

    return tf.map_fn(of_one, (inputs, cotangents), fn_output_signature=tf.TensorSpec(shape, inputs.dtype))


def kernel_gradient(convolve: Convolve, shape: Any, inputs: tf.Tensor, cotangent: tf.Tensor) -> tf.Tensor:
    """The gradient of a batch for a convolution's kernel, whatever the kernel is."""
    kernel = tf.zeros(shape, inputs.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(kernel)
        # Its result is not used, so only the gradient is computed.
        outputs = convolve(inputs, kernel)
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
