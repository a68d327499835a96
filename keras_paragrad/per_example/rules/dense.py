"""Dense layers."""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, RuleCase
from keras_paragrad.per_example.rules.linear import Linear, Product, flattened
from keras_paragrad.per_example.rules.low_rank_dense import LowRankDense


@register_rule(keras.layers.Dense)
class DenseRule(Linear):
    """y = a W + b at every position."""

    formula = r"$\sum_t a_t \delta_t^\top$"
    variants = (LowRankDense(),)
    norms_without_gradients = "one position: always; several: where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        activation, use_bias = pick(["tanh", None, "silu"]), pick([True, False])
        make = functools.partial(layer, units=pick([3, 1, 50]), activation=activation, use_bias=use_bias)
        return RuleCase(make, pick([(5,), (4, 3), (2, 3, 4), (40, 2), (2, 9)]))

    def product(self, call: Call) -> Product:
        left, right = (flattened(side, 1, side.shape.rank - 1) for side in (call.input, call.cotangent))
        return Product(tf.expand_dims(left, 1), tf.expand_dims(right, 1))

    def columns(self, call: Call) -> list[int]:
        return [call.cotangent.shape.rank - 1]

    def kernel(self, layer: Any, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return tf.squeeze(product, -3)
