"""Dense layers, with and without LoRA."""

import functools

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, RuleCase, register_rule
from keras_paragrad.per_example.rules.linear import Linear, Product, merge_axes
from keras_paragrad.per_example.rules.low_rank import (
    FactorGradient,
    LowRank,
    drop_group_axis,
    lora_factors,
    make_with_lora,
)


class LowRankDense(LowRank):
    """y = a (W + s A B) + b at every position."""

    formula = r"$s \sum_t a_t (B \delta_t)^\top$ and $s \sum_t (A^\top a_t) \delta_t^\top$"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = _draw_layer(layer, pick)
        make = make_with_lora(make, pick([2, 1, 5]), pick([3.0, 2.0]))
        return RuleCase(make, pick([(4, 3), (5,), (2, 3, 4), (40, 2)]))

    def factor_gradients(self, call: Call) -> tuple[FactorGradient, FactorGradient]:
        """The per-example gradients of LoRA's A and B, as products that aren't computed yet, with a group axis."""
        lora_a, lora_b, scale = lora_factors(call.layer, call.input.dtype)
        inputs, cotangent = _merge_positions(call.input), _merge_positions(call.cotangent)
        of_a = _product(inputs, scale * tf.einsum("btq,rq->btr", cotangent, lora_b))
        of_b = _product(scale * tf.einsum("btp,pr->btr", inputs, lora_a), cotangent)
        return FactorGradient(of_a, drop_group_axis), FactorGradient(of_b, drop_group_axis)


@register_rule(keras.layers.Dense)
class DenseRule(Linear):
    """y = a W + b at every position."""

    formula = r"$\sum_t a_t \delta_t^\top$"
    variants = (LowRankDense(),)
    norms_without_gradients = "one position: always; several: where that is cheaper"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return RuleCase(_draw_layer(layer, pick), pick([(5,), (4, 3), (2, 3, 4), (40, 2), (2, 9)]))

    def product(self, call: Call) -> Product:
        return _product(_merge_positions(call.input), _merge_positions(call.cotangent))

    def kernel(self, layer: keras.layers.Layer, product: tf.Tensor, by_xla: bool) -> tf.Tensor:
        return drop_group_axis(product)


def _draw_layer(layer: type[keras.layers.Layer], pick: Pick) -> functools.partial[keras.layers.Layer]:
    activation, use_bias = pick(["tanh", None, "silu"]), pick([True, False])
    return functools.partial(layer, units=pick([3, 1, 50]), activation=activation, use_bias=use_bias)


def _merge_positions(tensor: tf.Tensor) -> tf.Tensor:
    """`(batch, *positions, size)` as `(batch, positions, size)`."""
    return merge_axes(tensor, 1, tensor.shape.rank - 1)


def _product(left: tf.Tensor, right: tf.Tensor) -> Product:
    return Product(tf.expand_dims(left, 1), tf.expand_dims(right, 1))
