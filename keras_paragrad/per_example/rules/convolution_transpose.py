"""Transposed convolutions: convolutions with input and output swapped."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rules.convolution import Convolutional, flat, grouped_kernel
from keras_paragrad.per_example.rules.linear import Product, flattened
from keras_paragrad.per_example.rules.windows import Geometry, channels_last, spatial, windows


@register_rule(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)
class ConvolutionTransposeRule(Convolutional):
    """Positions are input pixels; rows are taps and channels of the output window that a pixel contributes to."""

    formula = r"$\sum_t a_t \delta_t^\top$, with input and output exchanged"

    def product(self, call: Call) -> Product:
        layer = call.layer
        inputs, cotangent = channels_last(call.input, layer), channels_last(call.cotangent, layer)
        found = windows(cotangent, Geometry.of(layer), spatial(inputs), call.by_xla)
        return Product(flattened(found, 2, 4)[:, tf.newaxis], flat(inputs)[:, tf.newaxis])

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return grouped_kernel(layer.kernel.shape, product, by_xla)
