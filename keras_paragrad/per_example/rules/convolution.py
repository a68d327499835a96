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
    pad_images,
    spatial_sizes,
    to_channels_last,
)

# From this kernel size on, XLA is faster with taps split between both factors. On two cores, 64 images of 16x16x16 and
# 7x7 taps took 3.8 ms instead of 6.4, 32 of 28x28x32 and 5x5 taps 10.8 instead of 15.4, but 64 of 8x8x64 and 3x3 taps
# 2.7 instead of 2.1.
MANY_TAPS = 5


class Convolutional(Linear):
    """The base class of the convolution rules.

    Rochette et al., https://arxiv.org/abs/1912.06015, and Lee and Kifer, https://arxiv.org/abs/2009.03106.
    """

    formula = r"$\sum_t a_t \delta_t^\top$ on windows"
    norms_without_gradients = "where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return convolution_case(layer, pick)

    def broadcast_bias(self, layer: keras.layers.Layer, rank: int) -> Sequence[int]:
        return broadcast_convolution_bias(layer, rank)

    def kernel(self, layer: keras.layers.Layer, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return grouped_kernel(layer.kernel.shape, product, by_xla)


@register_rule(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
class ConvolutionRule(Convolutional):
    """Positions are windows; rows are the taps and input channels of a group's windows."""

    def product(self, call: Call) -> Product:
        """The kernel's gradient: windows times cotangents."""
        layer = call.layer
        inputs, cotangent = to_channels_last(call.input, layer), to_channels_last(call.cotangent, layer)
        if self.shares_taps(call):
            return _product_of_shared_taps(inputs, cotangent, Geometry.of(layer))
        return grouped_product(inputs, cotangent, Geometry.of(layer), self.groups(layer, inputs), call.by_xla)

    def shares_taps(self, call: Call) -> bool:
        """Whether the taps are split between the factors, one axis each: see `_product_of_shared_taps`."""
        layer = call.layer
        inputs, cotangent = to_channels_last(call.input, layer), to_channels_last(call.cotangent, layer)
        known = inputs.shape[1:].is_fully_defined() and cotangent.shape[1:].is_fully_defined()
        if not (call.by_xla and known and inputs.shape.rank == 4 and self.groups(layer, inputs) == 1):
            return False
        has_many_taps = layer.kernel_size[0] >= MANY_TAPS and set(layer.strides) == {1}
        return has_many_taps and not _is_ghost(math.prod(spatial_sizes(cotangent)), layer.kernel.shape)

    def columns(self, call: Call) -> list[int]:
        if self.shares_taps(call):
            return []
        return [call.cotangent.shape.rank - 1 if call.layer.data_format == "channels_last" else 1]

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


def _product_of_shared_taps(inputs: tf.Tensor, cotangent: tf.Tensor, geometry: Geometry) -> Product:
    """The kernel gradient, with the last axis's taps in the left factor and the first axis's in the right.

    Each input row is paired with the cotangent rows whose windows contain it. Both factors together then hold as many
    copies as the kernel has rows plus columns, rather than taps.
    """
    rows, columns = spatial_sizes(cotangent)
    taps, dilation = geometry.kernel_size, geometry.dilation
    reach = (taps[0] - 1) * dilation[0]
    images: Any = tf.transpose(pad_images(inputs, geometry, [rows, columns])[:, : rows + reach], [0, 3, 1, 2])
    by_column = [images[..., tap * dilation[1] : tap * dilation[1] + columns] for tap in range(taps[1])]
    cotangent = tf.transpose(cotangent, [0, 3, 1, 2])
    starts = [tap * dilation[0] for tap in range(taps[0])]
    by_row = [tf.pad(cotangent, [[0, 0], [0, 0], [start, reach - start], [0, 0]]) for start in starts]
    return Product(_positions_first(tf.concat(by_column, 1)), _positions_first(tf.concat(by_row, 1)))


def _positions_first(side: tf.Tensor) -> tf.Tensor:
    """`(batch, channels, *spatial)` as `(batch, 1, positions, channels)`; XLA folds the transpose into the product."""
    return tf.transpose(merge_axes(side, 2, 4), [0, 2, 1])[:, tf.newaxis]


def grouped_kernel(shape: tf.TensorShape, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
    """A kernel's gradient `(..., groups, taps x channels, columns)` in its own shape, after the leading axes."""
    leading = [-1] if product.shape.rank == 4 else []
    sizes: Any = product.shape[-3:]
    groups, rows, columns = sizes
    taps: Any = list(shape[:-2])
    channels = rows // math.prod(taps)
    if groups == 1 and columns != shape[-1]:
        # The product is one of `_product_of_shared_taps`.
        split = tf.reshape(product, [*leading, taps[1], shape[2], taps[0], shape[3]])
        return tf.transpose(split, [*range(len(leading)), *(len(leading) + axis for axis in (2, 0, 1, 3))])
    step = 1 if first_axis_first(groups * channels, by_xla) else -1
    if groups == 1 and (step == 1 or len(taps) == 1):
        return tf.reshape(product, [*leading, *shape])
    split = tf.reshape(product, [*leading, groups, *taps[::step], channels, columns])
    group, *axes, channel, column = range(len(leading), split.shape.rank)
    in_order = tf.transpose(split, [*range(len(leading)), *axes[::step], channel, group, column])
    return tf.reshape(in_order, [*leading, *shape])


def broadcast_convolution_bias(layer: keras.layers.Layer, rank: int) -> Sequence[int]:
    """The shape in which a convolution layer adds its bias to outputs of rank `rank`."""
    size = layer.bias.shape[0]
    return [1] * (rank - 1) + [size] if layer.data_format == "channels_last" else [1, size] + [1] * (rank - 2)


def merge_positions(tensor: tf.Tensor) -> tf.Tensor:
    """`(batch, *spatial, channels)` as `(batch, positions, channels)`."""
    return merge_axes(tensor, 1, tensor.shape.rank - 1)


def _is_ghost(positions: int, shape: Any) -> bool:
    """Whether norms are cheaper from inner products of windows (ghost norms) than from the kernel's gradients."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return positions * (rows + columns) <= rows * columns


def _split_groups(patches: tf.Tensor, groups: int) -> tf.Tensor:
    """`(batch, positions, taps, channels)` as `(batch, groups, positions, taps x channels of a group)`."""
    if groups == 1:
        return merge_axes(patches, 2, 4)[:, tf.newaxis]
    shape: Any = patches.shape
    dynamic = tf.shape(patches)
    positions = dynamic[1] if shape[1] is None else shape[1]
    split = tf.reshape(patches, [dynamic[0], positions, shape[2], groups, shape[3] // groups])
    return merge_axes(tf.transpose(split, [0, 3, 1, 2, 4]), 3, 5)
