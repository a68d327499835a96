"""Separable convolutions: a depthwise convolution followed by a pointwise one."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import (
    Pick,
    Rule,
    RuleCase,
    register_rule,
    squared_norm,
    sums_of_biases,
    weighted_sum,
)
from keras_paragrad.per_example.rules import folded
from keras_paragrad.per_example.rules.convolution import (
    convolution_bias_shape,
    convolution_case,
    grouped_kernel,
    grouped_product,
    merge_positions,
)
from keras_paragrad.per_example.rules.linear import Product, bias_gradients
from keras_paragrad.per_example.rules.windows import Geometry, to_channels_last


@register_rule(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class SeparableRule(Rule):
    """Recomputes the depthwise output, and backpropagates the cotangent to it through the pointwise kernel."""

    before_activation = True
    formula = "the formulas of a depthwise convolution and of a dense layer"
    norms_without_gradients = "where that is cheaper, if not shared"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return convolution_case(layer, pick)

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        kernels = [layer.depthwise_kernel, layer.pointwise_kernel]
        return kernels if layer.bias is None else [*kernels, layer.bias]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        depthwise, product = _kernel_gradients(call)
        return [depthwise, self._pointwise(call, product.gradients()), *self._bias(call)]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        if len(calls) > 1:
            return super().squared_norms(calls)
        (call,) = calls
        depthwise, product = _kernel_gradients(call)
        norms = [squared_norm(depthwise, call.by_xla), product.squared_norms(call.by_xla)]
        return [*norms, *(squared_norm(bias, call.by_xla) for bias in self._bias(call))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        def sums_of_call(call: Call) -> list[tf.Tensor]:
            biases = sums_of_biases(lambda calls: self._bias(calls[0]), [call], weights)
            depthwise, product = _kernel_gradients(call)
            pointwise = self._pointwise(call, product.weighted_sum(weights))
            return [weighted_sum(weights, depthwise, call.by_xla), pointwise, *biases]

        return [tf.add_n(list(sums)) for sums in zip(*map(sums_of_call, calls), strict=True)]

    def _pointwise(self, call: Call, product: tf.Tensor) -> tf.Tensor:
        """Reshapes `(..., 1, rows, columns)` to the pointwise kernel's shape, after the batch if there is one."""
        leading = [-1] if product.shape.rank == 4 else []
        return tf.reshape(product, [*leading, *call.layer.pointwise_kernel.shape])

    def _bias(self, call: Call) -> list[tf.Tensor]:
        layer = call.layer
        if layer.bias is None:
            return []
        return [bias_gradients(call.cotangent, convolution_bias_shape(layer, call.cotangent.shape.rank), layer.bias)]


def _kernel_gradients(call: Call) -> tuple[tf.Tensor, Product]:
    """The per-example gradients of the depthwise kernel, and the pointwise kernel's as a product not yet computed."""
    layer = call.layer
    geometry = Geometry.of(layer)
    inputs, cotangent = to_channels_last(call.input, layer), to_channels_last(call.cotangent, layer)
    kernel, pointwise = (
        tf.cast(weight.value, inputs.dtype) for weight in (layer.depthwise_kernel, layer.pointwise_kernel)
    )
    depthwise_output = keras.ops.depthwise_conv(
        inputs, kernel, geometry.strides, geometry.padding, "channels_last", geometry.dilation
    )
    depthwise_cotangent = tf.tensordot(cotangent, tf.reshape(pointwise, pointwise.shape[-2:]), [[-1], [1]])
    depthwise_cotangent = tf.ensure_shape(depthwise_cotangent, [*cotangent.shape[:-1], pointwise.shape[-2]])
    product = Product(merge_positions(depthwise_output)[:, tf.newaxis], merge_positions(cotangent)[:, tf.newaxis])
    if call.gradients is None:
        call.gradients = [_depthwise_gradients(call, geometry, inputs, depthwise_cotangent)]
    return call.gradients[0], product


def _depthwise_gradients(call: Call, geometry: Geometry, inputs: tf.Tensor, cotangent: tf.Tensor) -> tf.Tensor:
    """The per-example gradients of the depthwise kernel, from the cotangent of the depthwise output."""
    shape = call.layer.depthwise_kernel.shape
    if folded.can_fold(call):
        return folded.depthwise_gradients(inputs, cotangent, geometry, shape)
    product = grouped_product(inputs, cotangent, geometry, shape[-2], call.by_xla)
    return grouped_kernel(shape, product.gradients(), call.by_xla)
