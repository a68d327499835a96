"""Dense layers with LoRA."""

import functools

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, RuleCase
from keras_paragrad.per_example.rules.linear import Product, flattened
from keras_paragrad.per_example.rules.low_rank import FactorGradient, LowRank, factors, of_matrix, with_lora


class LowRankDense(LowRank):
    """y = a (W + s A B) + b at every position."""

    formula = r"$s \sum_t a_t (B \delta_t)^\top$ and $s \sum_t (A^\top a_t) \delta_t^\top$"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        activation, use_bias = pick(["tanh", None, "silu"]), pick([True, False])
        make = functools.partial(layer, units=pick([3, 1, 50]), activation=activation, use_bias=use_bias)
        return RuleCase(with_lora(make, pick([2, 1, 5]), pick([3.0, 2.0])), pick([(4, 3), (5,), (2, 3, 4), (40, 2)]))

    def parts(self, call: Call) -> tuple[FactorGradient, FactorGradient]:
        a, b, scale = factors(call.layer, call.input.dtype)
        left, right = (flattened(side, 1, side.shape.rank - 1) for side in (call.input, call.cotangent))
        narrow_left = scale * tf.einsum("btp,pr->btr", left, a)
        narrow_right = scale * tf.einsum("btq,rq->btr", right, b)
        left, right, narrow_left, narrow_right = (
            tf.expand_dims(side, 1) for side in (left, right, narrow_left, narrow_right)
        )
        return FactorGradient(Product(left, narrow_right), of_matrix), FactorGradient(
            Product(narrow_left, right), of_matrix
        )
