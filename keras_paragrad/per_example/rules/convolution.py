"""Convolutions: a dense layer on every window."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened
from keras_paragrad.per_example.rules.windows import Geometry, channels_last, spatial, windows


class Convolutional(Linear):
    """What convolutions of all kinds share.

    Rochette et al., https://arxiv.org/abs/1912.06015, and Lee and Kifer, https://arxiv.org/abs/2009.03106.
    """

    def biases(self, call: Call) -> tf.Tensor:
        cotangent = channels_last(call.cotangent, call.layer)
        return tf.reduce_sum(cotangent, list(range(1, cotangent.shape.rank - 1)))


@register_rule(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
class ConvolutionRule(Convolutional):
    """Positions are windows; a group's rows are the taps and input channels of a window."""

    def product(self, call: Call) -> Product:
        layer = call.layer
        cotangent = channels_last(call.cotangent, layer)
        found = windows(channels_last(call.input, layer), Geometry.of(layer), spatial(cotangent))
        return Product(_grouped(found, layer.groups), _grouped(flat(cotangent)[:, :, tf.newaxis], layer.groups))

    def kernel(self, layer: Any, product: tf.Tensor) -> tf.Tensor:
        *leading, groups, rows, columns = range(product.shape.rank)
        in_order = tf.transpose(product, [*leading, rows, groups, columns])
        return _reshaped(in_order, len(leading), layer.kernel.shape)


@register_rule(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseRule(Convolutional):
    """As many groups as input channels; rows are the taps."""

    def product(self, call: Call) -> Product:
        cotangent = channels_last(call.cotangent, call.layer)
        return depthwise_product(channels_last(call.input, call.layer), cotangent, Geometry.of(call.layer))

    def kernel(self, layer: Any, product: tf.Tensor) -> tf.Tensor:
        return depthwise_kernel(layer.kernel.shape, product)


def depthwise_product(inputs: tf.Tensor, cotangent: tf.Tensor, geometry: Geometry) -> Product:
    """The gradient of a depthwise kernel; both tensors have their channels last."""
    left = tf.transpose(windows(inputs, geometry, spatial(cotangent)), [0, 3, 1, 2])
    right = tf.reshape(flat(cotangent), [-1, *flat(cotangent).shape[1:2], inputs.shape[-1], cotangent.shape[-1] // inputs.shape[-1]])
    return Product(left, tf.transpose(right, [0, 2, 1, 3]))


def depthwise_kernel(shape: tf.TensorShape, product: tf.Tensor) -> tf.Tensor:
    """A depthwise kernel's gradient in its own shape, after the leading axes."""
    *leading, groups, rows, columns = range(product.shape.rank)
    return _reshaped(tf.transpose(product, [*leading, rows, groups, columns]), len(leading), shape)


def flat(tensor: tf.Tensor) -> tf.Tensor:
    """`(batch, *spatial, channels)` as `(batch, positions, channels)`."""
    return flattened(tensor, 1, tensor.shape.rank - 1)


def _grouped(found: tf.Tensor, groups: int) -> tf.Tensor:
    """`(batch, positions, taps, channels)` as `(batch, groups, positions, taps x channels of a group)`."""
    _, positions, taps, channels = found.shape
    if groups == 1:
        return flattened(found, 2, 4)[:, tf.newaxis]
    batch = tf.shape(found)[0]
    positions = tf.shape(found)[1] if positions is None else positions
    apart = tf.reshape(found, [batch, positions, taps, groups, channels // groups])
    return flattened(tf.transpose(apart, [0, 3, 1, 2, 4]), 3, 5)


def _reshaped(tensor: tf.Tensor, leading: int, shape: Any) -> tf.Tensor:
    return tf.reshape(tensor, [-1, *shape] if leading else list(shape))
