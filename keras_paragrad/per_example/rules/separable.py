"""Separable convolutions: a depthwise one, and a dense layer on what comes out of it."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, Rule, register_rule, squared_norm
from keras_paragrad.per_example.rules.convolution import convolution_bias, flat, grouped_kernel, grouped_product
from keras_paragrad.per_example.rules.linear import Product, bias_gradients
from keras_paragrad.per_example.rules.windows import Geometry, channels_last


@register_rule(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class SeparableRule(Rule):
    """The depthwise output is computed again, and the cotangent brought back to it through the pointwise kernel."""

    before_activation = True

    def variables(self, layer: Any) -> list[keras.Variable]:
        kernels = [layer.depthwise_kernel, layer.pointwise_kernel]
        return kernels if layer.bias is None else [*kernels, layer.bias]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self._shaped(call, [product.gradients() for product in _products(call)], self._bias(call))

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        if len(calls) > 1:
            return super().squared_norms(calls)
        (call,) = calls
        norms = [product.squared_norms(call.by_xla) for product in _products(call)]
        return [*norms, *(squared_norm(bias, call.by_xla) for bias in self._bias(call))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        def of_call(call: Call) -> list[tf.Tensor]:
            biases = [tf.tensordot(weights, bias, 1) for bias in self._bias(call)]
            return self._shaped(call, [product.weighted_sum(weights) for product in _products(call)], biases)

        return [tf.add_n(list(parts)) for parts in zip(*map(of_call, calls), strict=True)]

    def _shaped(self, call: Call, products: list[tf.Tensor], biases: list[tf.Tensor]) -> list[tf.Tensor]:
        depthwise, pointwise = products
        layer: Any = call.layer
        leading = [-1] if depthwise.shape.rank == 4 else []
        return [
            grouped_kernel(layer.depthwise_kernel.shape, depthwise, call.by_xla),
            tf.reshape(pointwise, [*leading, *layer.pointwise_kernel.shape]),
            *biases,
        ]

    def _bias(self, call: Call) -> list[tf.Tensor]:
        layer: Any = call.layer
        if layer.bias is None:
            return []
        return [bias_gradients(call.cotangent, convolution_bias(layer, call.cotangent.shape.rank), layer.bias)]


def _products(call: Call) -> tuple[Product, Product]:
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
    return grouped_product(inputs, returned, geometry, kernel.shape[-2], call.by_xla), product
