"""Dense layers."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened


@register_rule(keras.layers.Dense)
class DenseRule(Linear):
    """y = a W + b at every position."""

    def product(self, call: Call) -> Product:
        left, right = (flattened(side, 1, side.shape.rank - 1) for side in (call.input, call.cotangent))
        return Product(tf.expand_dims(left, 1), tf.expand_dims(right, 1))

    def columns(self, call: Call) -> list[int]:
        return [call.cotangent.shape.rank - 1]

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return tf.squeeze(product, -3)
