"""Embeddings: rows looked up by index."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase
from keras_paragrad.per_example.rules.looked_up import LookedUp, lookups
from keras_paragrad.per_example.rules.low_rank_embedding import LowRankEmbedding


@register_rule(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """An example's gradient is nonzero only in the rows it looked up; a row looked up twice gets the sum.

    Rows are sorted and summed within each example; if there are few, inner products of rows with equal indices are
    summed instead. No table per example is materialized until gradients are read.
    """

    formula = "the rows looked up"
    norms_without_gradients = "always"
    variants = (LowRankEmbedding(),)

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = functools.partial(layer, input_dim=9, output_dim=pick([2, 1, 3, 4]))
        return RuleCase(make, pick([(), (1,), (7,), (2, 5)]), vocabulary=pick([2, 9]))

    def variables(self, layer: Any) -> list[keras.Variable]:
        return [layer.embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_looked_up(calls).factors().materialized()]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        return [_looked_up(calls).gradients_to_keep()]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_looked_up(calls).squared_norms()]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_looked_up(calls).second_moment()]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        return [_looked_up(calls).weighted_sum(weights)]


def _looked_up(calls: Sequence[Call]) -> LookedUp:
    layer: Any = calls[0].layer
    return LookedUp(*lookups(calls), layer.input_dim)
