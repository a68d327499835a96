"""Separable convolutions: a depthwise convolution followed by a pointwise one."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase, squared_norm, sums_of_biases, weighted_sum
from keras_paragrad.per_example.rules import folded
from keras_paragrad.per_example.rules.convolution import (
    convolution_bias,
    flat,
    grouped_kernel,
    grouped_product,
)
from keras_paragrad.per_example.rules.convolution_case import convolution_case
from keras_paragrad.per_example.rules.linear import Product, bias_gradients
from keras_paragrad.per_example.rules.windows import Geometry, channels_last


@register_rule(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class SeparableRule(Rule):
    """Recomputes the depthwise output, and backpropagates the cotangent to it through the pointwise kernel."""

    before_activation = True
    formula = "those of a depthwise convolution and a dense layer"
    norms_without_gradients = "where that is cheaper, if not shared"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return convolution_case(layer, pick)

    def variables(self, layer: Any) -> list[keras.Variable]:
        kernels = [layer.depthwise_kernel, layer.pointwise_kernel]
        return kernels if layer.bias is None else [*kernels, layer.bias]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        by_depth, product = _parts(call)
        return [by_depth, self._pointwise(call, product.gradients()), *self._bias(call)]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        if len(calls) > 1:
            return super().squared_norms(calls)
        (call,) = calls
        by_depth, product = _parts(call)
        norms = [squared_norm(by_depth, call.by_xla), product.squared_norms(call.by_xla)]
        return [*norms, *(squared_norm(bias, call.by_xla) for bias in self._bias(call))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        def of_call(call: Call) -> list[tf.Tensor]:
            biases = sums_of_biases(lambda calls: self._bias(calls[0]), [call], weights)
            by_depth, product = _parts(call)
            pointwise = self._pointwise(call, product.weighted_sum(weights))
            return [weighted_sum(weights, by_depth, call.by_xla), pointwise, *biases]

        return [tf.add_n(list(parts)) for parts in zip(*map(of_call, calls), strict=True)]

    def _pointwise(self, call: Call, product: tf.Tensor) -> tf.Tensor:
        layer: Any = call.layer
        leading = [-1] if product.shape.rank == 4 else []
        return tf.reshape(product, [*leading, *layer.pointwise_kernel.shape])

    def _bias(self, call: Call) -> list[tf.Tensor]:
        layer: Any = call.layer
        if layer.bias is None:
            return []
        return [bias_gradients(call.cotangent, convolution_bias(layer, call.cotangent.shape.rank), layer.bias)]


def _parts(call: Call) -> tuple[tf.Tensor, Product]:
    """Each example's gradient for the depthwise kernel, and the pointwise kernel's as a product."""
    layer: Any = call.layer
    geometry = Geometry.of(layer)
    inputs, cotangent = channels_last(call.input, layer), channels_last(call.cotangent, layer)
    kernel, pointwise = (
        tf.cast(weight.value, inputs.dtype) for weight in (layer.depthwise_kernel, layer.pointwise_kernel)
    )
    between = keras.ops.depthwise_conv(
        inputs, kernel, geometry.strides, geometry.padding, "channels_last", geometry.dilation
    )
    returned = tf.tensordot(cotangent, tf.reshape(pointwise, pointwise.shape[-2:]), [[-1], [1]])
    returned = tf.ensure_shape(returned, [*cotangent.shape[:-1], pointwise.shape[-2]])
    product = Product(flat(between)[:, tf.newaxis], flat(cotangent)[:, tf.newaxis])
    if call.gradients is None:
        call.gradients = [_depthwise_gradients(call, geometry, inputs, returned)]
    return call.gradients[0], product


def _depthwise_gradients(call: Call, geometry: Geometry, inputs: tf.Tensor, cotangent: tf.Tensor) -> tf.Tensor:
    layer: Any = call.layer
    shape = layer.depthwise_kernel.shape
    if folded.suits(call):
        return folded.depthwise(inputs, cotangent, geometry, shape)
    product = grouped_product(inputs, cotangent, geometry, shape[-2], call.by_xla)
    return grouped_kernel(shape, product.gradients(), call.by_xla)
