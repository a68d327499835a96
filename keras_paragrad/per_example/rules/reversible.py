"""Reversible embeddings: a table used for lookups and, transposed, for scores of all words."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase, register_rule
from keras_paragrad.per_example.rules.embedding import EmbeddingRule, concatenate_lookups


@register_rule(keras.layers.ReversibleEmbedding)
class ReversibleEmbeddingRule(Rule):
    """Lookups add rows E to the gradient; scoring h adds sum_s d_s h_s', with cotangents d over the words.

    With a tied table, |E + sum_s d_s h_s'|^2 has a cross term that needs only the scores of the words looked up: 2
    sum_ts d_s[i_t] (h_s'e_t). No per-example table is materialized.
    """

    formula = r"the rows looked up, plus $\sum_s \delta_s h_s^\top$"
    norms_without_gradients = "always"
    _embedding = EmbeddingRule()

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = functools.partial(layer, input_dim=9, output_dim=pick([2, 1, 3]), tie_weights=pick([True, False]))
        return RuleCase(make, pick([(7,), (1,), (2, 5)]), vocabulary=pick([2, 9]))

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [layer.embeddings] if layer.tie_weights else [layer.embeddings, layer.reverse_embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        lookups, scorings = _split_calls(calls)
        table = self._embedding.gradients_of_all(lookups) if lookups else []
        scores = [tf.einsum("bsv,bsw->bvw", *_concatenate_scores(scorings))] if scorings else []
        return self._by_weight(calls, table, scores, lambda gradient: tf.transpose(gradient, [0, 2, 1]))

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        lookups, scorings = _split_calls(calls)
        table = self._embedding.squared_norms(lookups) if lookups else []
        if not scorings:
            return self._by_weight(calls, table, [], lambda norms: norms)
        cotangents, hidden = _concatenate_scores(scorings)
        products = tf.matmul(cotangents, cotangents, transpose_b=True) * tf.matmul(hidden, hidden, transpose_b=True)
        scores = [tf.reduce_sum(products, [1, 2])]
        if lookups and calls[0].layer.tie_weights:
            indices, rows = concatenate_lookups(lookups)
            cross = tf.gather(cotangents, indices, axis=2, batch_dims=1) * tf.matmul(hidden, rows, transpose_b=True)
            table.append(2 * tf.reduce_sum(cross, [1, 2]))
        return self._by_weight(calls, table, scores, lambda norms: norms)

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        lookups, scorings = _split_calls(calls)
        table = self._embedding.weighted_sums(lookups, weights) if lookups else []
        scores = []
        if scorings:
            cotangents, hidden = _concatenate_scores(scorings)
            scores = [tf.einsum("bsv,bsw->vw", cotangents * weights[:, tf.newaxis, tf.newaxis], hidden)]
        return self._by_weight(calls, table, scores, tf.transpose)

    def _by_weight(
        self, calls: Sequence[Call], table: list[Any], scores: list[Any], transpose: Callable[[tf.Tensor], tf.Tensor]
    ) -> list[tf.Tensor]:
        """The parts summed for the tied table, or one for each of the two untied tables."""
        by_weight = [table + scores] if calls[0].layer.tie_weights else [table, list(map(transpose, scores))]
        parts = [[tf.convert_to_tensor(part) for part in parts] for parts in by_weight]
        if not all(parts):
            zeros = tf.zeros_like(next(each[0] for each in parts if each))
            parts = [each or [transpose(zeros)] for each in parts]
        return [tf.add_n(each) for each in parts]


def _split_calls(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Splits the calls into lookups and scorings."""
    parts: tuple[list[Call], list[Call]] = [], []
    for call in calls:
        parts[bool(call.keywords.get("reverse", (*call.arguments[1:], False)[0]))].append(call)
    return parts


def _concatenate_scores(calls: Sequence[Call]) -> tuple[tf.Tensor, tf.Tensor]:
    """The cotangents of the scores, `(batch, scores, words)`, and the inputs scored, `(batch, scores, width)`."""
    cotangents = [_merge_positions(_cotangent_before_cap(call)) for call in calls]
    return tf.concat(cotangents, 1), tf.concat([_merge_positions(call.input) for call in calls], 1)


def _cotangent_before_cap(call: Call) -> tf.Tensor:
    if call.layer.logit_soft_cap is None:
        return call.cotangent
    capped = tf.cast(call.outputs[0], call.cotangent.dtype) / call.layer.logit_soft_cap
    return call.cotangent * (1 - tf.square(capped))


def _merge_positions(tensor: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(tensor)
    return tf.reshape(tensor, tf.stack([shape[0], -1, tensor.shape[-1]]))
