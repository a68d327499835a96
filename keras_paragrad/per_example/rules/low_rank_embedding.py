"""Embeddings with LoRA."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase
from keras_paragrad.per_example.rules.linear import Product
from keras_paragrad.per_example.rules.looked_up import LookedUp, lookups
from keras_paragrad.per_example.rules.low_rank import of_matrix, with_lora


class LowRankEmbedding(Rule):
    """The table is E + s A B. The gradient of A is nonzero in the rows looked up, as narrow as the rank; that of B is
    sum_t (s A[i_t]) d_t', a dense layer's."""

    formula = r"the rows looked up of $s \delta B^\top$, and $s \sum_t A_{i_t} \delta_t^\top$"
    norms_without_gradients = "of $A$ always; of $B$ where that is cheaper"
    configuration = "with LoRA"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = functools.partial(layer, input_dim=9, output_dim=pick([3, 1, 4]))
        shape, vocabulary = pick([(7,), (), (1,), (2, 5)]), pick([2, 9])
        return RuleCase(with_lora(make, pick([2, 1, 5]), pick([3.0, 2.0])), shape, vocabulary)

    def suits(self, layer: Any) -> bool:
        return layer.lora_enabled and super().suits(layer)

    def variables(self, layer: Any) -> list[keras.Variable]:
        return [layer.lora_embeddings_a, layer.lora_embeddings_b]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        rows, product = _parts(calls)
        return [rows.factors().materialized(), of_matrix(product.gradients())]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        rows, product = _parts(calls)
        return [rows.gradients_to_keep(), of_matrix(product.gradients())]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        rows, product = _parts(calls)
        return [rows.squared_norms(), product.squared_norms(calls[0].by_xla)]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        rows, product = _parts(calls)
        return [rows.second_moment(), of_matrix(product.second_moment())]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        rows, product = _parts(calls)
        # Dense, as the plain gradient of A, which is multiplied by B before rows are looked up.
        return [tf.convert_to_tensor(rows.weighted_sum(weights)), of_matrix(product.weighted_sum(weights))]


def _parts(calls: Sequence[Call]) -> tuple[LookedUp, Product]:
    """The gradients of A and of B."""
    layer: Any = calls[0].layer
    indices, cotangents = lookups(calls)
    a, b = (
        tf.cast(tf.convert_to_tensor(each.value), cotangents.dtype)
        for each in (layer.lora_embeddings_a, layer.lora_embeddings_b)
    )
    scale = layer.lora_alpha / layer.lora_rank
    rows = LookedUp(indices, scale * tf.einsum("btq,rq->btr", cotangents, b), layer.input_dim)
    left, right = scale * tf.gather(a, indices), cotangents
    return rows, Product(tf.expand_dims(left, 1), tf.expand_dims(right, 1))
