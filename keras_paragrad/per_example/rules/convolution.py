"""Convolutions: a dense layer applied to every window.

A tap is a spatial position of the kernel.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, RuleCase, register_rule
from keras_paragrad.per_example.rules import folded
from keras_paragrad.per_example.rules.linear import Linear, Product, merge_axes
from keras_paragrad.per_example.rules.windows import (
    Geometry,
    extract_windows,
    first_axis_first,
    spatial_sizes,
    to_channels_last,
)


class Convolutional(Linear):
    """The base class of the convolution rules.

    Rochette et al., https://arxiv.org/abs/1912.06015, and Lee and Kifer, https://arxiv.org/abs/2009.03106.
    """

    formula = r"$\sum_t a_t \delta_t^\top$ on windows"
    norms_without_gradients = "where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return convolution_case(layer, pick)

    def bias_shape_in_output(self, layer: keras.layers.Layer, rank: int) -> Sequence[int]:
        return convolution_bias_shape(layer, rank)

    def kernel(self, layer: keras.layers.Layer, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return grouped_kernel(layer.kernel.shape, product, by_xla)


@register_rule(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
class ConvolutionRule(Convolutional):
    """Positions are windows; rows are the taps and input channels of a group's windows."""

    def product(self, call: Call) -> Product:
        """The kernel's gradient: windows times cotangents."""
        layer = call.layer
        inputs, cotangent = to_channels_last(call.input, layer), to_channels_last(call.cotangent, layer)
        return grouped_product(inputs, cotangent, Geometry.of(layer), self.groups(layer, inputs), call.by_xla)

    def groups(self, layer: keras.layers.Layer, inputs: tf.Tensor) -> int:
        """The number of channel groups."""
        return layer.groups

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        # `keras.ops.conv` has no causal padding.
        if call.layer.padding == "causal":
            return super().kernel_sum(call, weights)
        cotangent = call.cotangent * tf.reshape(weights, [-1, *[1] * (call.cotangent.shape.rank - 1)])
        return _kernel_gradient(call.layer, call.input, cotangent)


@register_rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseRule(ConvolutionRule):
    """As many groups as channels."""

    def groups(self, layer: keras.layers.Layer, inputs: Any) -> int:
        return inputs.shape[-1]

    def kernel_sum(self, call: Call, weights: tf.Tensor) -> tf.Tensor:
        # `_kernel_gradient` is for convolutions over channels.
        return Convolutional.kernel_sum(self, call, weights)

    def folded(self, calls: Sequence[Call]) -> tf.Tensor | None:
        # Their products have one column per channel, where a matmul reuses nothing. A single call caches the result.
        (call, *others), layer = calls, calls[0].layer
        if others or not folded.can_fold(call):
            return None
        if call.gradients is None:
            call.gradients = [
                folded.depthwise_gradients(call.input, call.cotangent, Geometry.of(layer), layer.kernel.shape)
            ]
        return call.gradients[0]


@register_rule(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)
class ConvolutionTransposeRule(Convolutional):
    """Positions are input pixels; rows are taps and channels of the output window that a pixel contributes to."""

    formula = r"$\sum_t a_t \delta_t^\top$, with input and output exchanged"

    def product(self, call: Call) -> Product:
        layer = call.layer
        inputs, cotangent = to_channels_last(call.input, layer), to_channels_last(call.cotangent, layer)
        patches = extract_windows(cotangent, Geometry.of(layer), spatial_sizes(inputs), call.by_xla)
        return Product(merge_axes(patches, 2, 4)[:, tf.newaxis], merge_positions(inputs)[:, tf.newaxis])


def convolution_case(layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
    """The `Rule.case` of any convolution: a stride, a dilation or neither, as TensorFlow has no kernel for both."""
    name = layer.__name__
    rank = next(rank for rank in (1, 2, 3) if f"{rank}D" in name)
    is_depthwise, is_transposed = name.startswith("Depthwise"), name.endswith("Transpose")
    has_multiplier = is_depthwise or name.startswith("Separable")
    channels = pick([2, 1, 4, 16])
    arguments: dict[str, Any] = {
        "kernel_size": tuple(pick([2, 1, 3]) for _ in range(rank)),
        "padding": pick(["same", "valid", "causal"] if name == "Conv1D" else ["same", "valid"]),
        "activation": pick(["tanh", None, "silu"]),
        "use_bias": pick([True, False]),
    }
    spacing = pick(["strides", "dilation_rate", "neither"])
    if spacing == "strides":
        # Depthwise convolutions have one stride for both axes.
        arguments["strides"] = pick([2, 1, 3]) if has_multiplier else tuple(pick([2, 1, 3]) for _ in range(rank))
    elif spacing == "dilation_rate" and not (rank == 3 or is_transposed):
        arguments["dilation_rate"] = pick([2, 1])
    if has_multiplier:
        arguments["depth_multiplier"] = pick([2, 1])
    if not is_depthwise:
        groups = pick([1, 2]) if name in ("Conv1D", "Conv2D") and channels % 2 == 0 else 1
        arguments["filters"] = groups * pick([2, 1, 3, 4])
        if groups > 1:
            arguments["groups"] = groups
    channels_first = pick([True, False]) and rank == 2
    if channels_first:
        arguments["data_format"] = "channels_first"
    sizes = [pick([6, 7, 8]) for _ in range(rank)]
    return RuleCase(functools.partial(layer, **arguments), (channels, *sizes) if channels_first else (*sizes, channels))


def _kernel_gradient(layer: keras.layers.Layer, inputs: tf.Tensor, cotangent: tf.Tensor) -> tf.Tensor:
    """The batch's kernel gradient of a convolution layer; it doesn't depend on the kernel's value."""
    kernel = tf.zeros(layer.kernel.shape, inputs.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(kernel)
        # The output is unused, so only the gradient is computed.
        outputs = keras.ops.conv(inputs, kernel, layer.strides, layer.padding, layer.data_format, layer.dilation_rate)
    (gradient,) = tape.gradient(outputs, [kernel], output_gradients=[cotangent])
    return tf.convert_to_tensor(gradient)


def grouped_product(inputs: tf.Tensor, cotangent: tf.Tensor, geometry: Geometry, groups: int, by_xla: bool) -> Product:
    """The gradient of a convolution's kernel; both tensors have their channels last."""
    patches = extract_windows(inputs, geometry, spatial_sizes(cotangent), by_xla)
    return Product(_split_groups(patches, groups), _split_groups(merge_positions(cotangent)[:, :, tf.newaxis], groups))


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
    split = tf.reshape(product, [*leading, groups, *taps[::step], channels, columns])
    group, *axes, channel, column = range(len(leading), split.shape.rank)
    in_order = tf.transpose(split, [*range(len(leading)), *axes[::step], channel, group, column])
    return tf.reshape(in_order, [*leading, *shape])


def convolution_bias_shape(layer: keras.layers.Layer, rank: int) -> Sequence[int]:
    """The shape in which a convolution layer adds its bias to outputs of rank `rank`."""
    size = layer.bias.shape[0]
    return [1] * (rank - 1) + [size] if layer.data_format == "channels_last" else [1, size] + [1] * (rank - 2)


def merge_positions(tensor: tf.Tensor) -> tf.Tensor:
    """`(batch, *spatial, channels)` as `(batch, positions, channels)`."""
    return merge_axes(tensor, 1, tensor.shape.rank - 1)


def _split_groups(patches: tf.Tensor, groups: int) -> tf.Tensor:
    """`(batch, positions, taps, channels)` as `(batch, groups, positions, taps x channels of a group)`."""
    if groups == 1:
        return merge_axes(patches, 2, 4)[:, tf.newaxis]
    shape: Any = patches.shape
    dynamic = tf.shape(patches)
    positions = dynamic[1] if shape[1] is None else shape[1]
    split = tf.reshape(patches, [dynamic[0], positions, shape[2], groups, shape[3] // groups])
    return merge_axes(tf.transpose(split, [0, 3, 1, 2, 4]), 3, 5)
