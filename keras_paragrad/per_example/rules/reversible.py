"""Reversible embeddings: a table used for lookups and, transposed, for scores."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase
from keras_paragrad.per_example.rules.embedding import EmbeddingRule
from keras_paragrad.per_example.rules.looked_up import lookups


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

    def variables(self, layer: Any) -> list[keras.Variable]:
        return [layer.embeddings] if layer.tie_weights else [layer.embeddings, layer.reverse_embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        looked_up, scored = _apart(calls)
        table = self._embedding.gradients_of_all(looked_up) if looked_up else []
        scores = [tf.einsum("bsv,bsw->bvw", *_scores(scored))] if scored else []
        return self._by_weight(calls, table, scores, lambda gradient: tf.transpose(gradient, [0, 2, 1]))

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        looked_up, scored = _apart(calls)
        table = self._embedding.squared_norms(looked_up) if looked_up else []
        if not scored:
            return self._by_weight(calls, table, [], lambda norms: norms)
        cotangents, hidden = _scores(scored)
        alike = tf.matmul(cotangents, cotangents, transpose_b=True) * tf.matmul(hidden, hidden, transpose_b=True)
        scores = [tf.reduce_sum(alike, [1, 2])]
        if looked_up and self._is_tied(calls):
            indices, rows = lookups(looked_up)
            of_looked_up = tf.gather(cotangents, indices, axis=2, batch_dims=1)
            table.append(2 * tf.reduce_sum(of_looked_up * tf.matmul(hidden, rows, transpose_b=True), [1, 2]))
        return self._by_weight(calls, table, scores, lambda norms: norms)

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        looked_up, scored = _apart(calls)
        table = self._embedding.weighted_sums(looked_up, weights) if looked_up else []
        scores = []
        if scored:
            cotangents, hidden = _scores(scored)
            scores = [tf.einsum("bsv,bsw->vw", cotangents * weights[:, tf.newaxis, tf.newaxis], hidden)]
        return self._by_weight(calls, table, scores, tf.transpose)

    def _is_tied(self, calls: Sequence[Call]) -> bool:
        layer: Any = calls[0].layer
        return layer.tie_weights

    def _by_weight(self, calls: Sequence[Call], table: list[Any], scores: list[Any], turned: Any) -> list[Any]:
        """The parts summed for the tied table, or one for each of the two untied tables."""
        of_weights = [table + scores] if self._is_tied(calls) else [table, list(map(turned, scores))]
        found = [[tf.convert_to_tensor(part) for part in parts] for parts in of_weights]
        if not all(found):
            empty = tf.zeros_like(next(parts[0] for parts in found if parts))
            found = [parts or [turned(empty)] for parts in found]
        return [tf.add_n(parts) for parts in found]


def _apart(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Splits the calls into lookups and scorings."""
    reverse = [bool(call.keywords.get("reverse", (*call.arguments[1:], False)[0])) for call in calls]
    pairs = list(zip(calls, reverse, strict=True))
    return [call for call, scores in pairs if not scores], [call for call, scores in pairs if scores]


def _scores(calls: Sequence[Call]) -> tuple[tf.Tensor, tf.Tensor]:
    """The cotangents of the scores, `(batch, scores, words)`, and the inputs scored, `(batch, scores, width)`."""
    cotangents = [_positions(_before_cap(call)) for call in calls]
    return tf.concat(cotangents, 1), tf.concat([_positions(call.input) for call in calls], 1)


def _before_cap(call: Call) -> tf.Tensor:
    layer: Any = call.layer
    if layer.logit_soft_cap is None:
        return call.cotangent
    capped = tf.cast(call.outputs[0], call.cotangent.dtype) / layer.logit_soft_cap
    return call.cotangent * (1 - tf.square(capped))


def _positions(tensor: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(tensor)
    return tf.reshape(tensor, tf.stack([shape[0], -1, tensor.shape[-1]]))
