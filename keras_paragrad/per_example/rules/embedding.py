"""Embeddings, also reversible: an example's gradient of lookups is zero in all rows that it has not looked up."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import REVERSIBLE_EMBEDDINGS
from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Factors, Pick, Rule, RuleCase, register_rule

# Up to this many lookups, comparing all pairs is faster than sorting.
FEW_LOOKUPS = 128


class _TableLayout(NamedTuple):
    """The layout of table gradients stored as the rows looked up, which may repeat; `size` is the table's rows."""

    size: int

    def __call__(self, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        batch, width = tf.shape(indices)[0], values.shape[-1]
        segments = tf.reshape(indices + tf.range(batch)[:, tf.newaxis] * self.size, [-1])
        rows = tf.math.unsorted_segment_sum(tf.reshape(values, [-1, width]), segments, batch * self.size)
        return tf.reshape(rows, [-1, self.size, width])


@register_rule(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """An example's gradient is nonzero only in the rows it looked up; a row looked up twice gets the sum.

    Rows are sorted and summed within each example; if there are few, inner products of rows with equal indices are
    summed instead. No table per example is materialized until gradients are read.
    """

    formula = "the rows looked up"
    norms_without_gradients = "always"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = functools.partial(layer, input_dim=9, output_dim=pick([2, 1, 3, 4]))
        return RuleCase(make, pick([(), (1,), (7,), (2, 5)]), vocabulary=pick([2, 9]))

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [layer.embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_TableLayout(calls[0].layer.input_dim)(*concatenate_lookups(calls))]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        indices, cotangents = concatenate_lookups(calls)
        factors = Factors((indices, cotangents), _TableLayout(calls[0].layer.input_dim))
        return [factors.materialized() if (indices.shape[1] or 0) > calls[0].layer.input_dim else factors]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        indices, cotangents = concatenate_lookups(calls)
        if (indices.shape[1] or FEW_LOOKUPS + 1) <= FEW_LOOKUPS:
            same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], cotangents.dtype)
            return [tf.reduce_sum(same * tf.matmul(cotangents, cotangents, transpose_b=True), [1, 2])]
        _, values = _sum_duplicates(indices, cotangents)
        return [tf.reduce_sum(tf.reshape(tf.reduce_sum(tf.square(values), 1), tf.shape(indices)), 1)]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        indices, values = _sum_duplicates(*concatenate_lookups(calls))
        return [tf.math.unsorted_segment_sum(tf.square(values), indices, calls[0].layer.input_dim)]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        indices, cotangents = concatenate_lookups(calls)
        width: Any = cotangents.shape[-1]
        values = tf.reshape(cotangents * weights[:, tf.newaxis, tf.newaxis], [-1, width])
        shape = tf.constant([calls[0].layer.input_dim, width])
        return [tf.IndexedSlices(values, tf.reshape(indices, [-1]), shape)]


def _sum_duplicates(indices: tf.Tensor, cotangents: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the cotangents of equal indices in each example: indices `(count,)` and sums `(count, width)`.

    Each example has as many entries as lookups: the sums first, in sorted order, and then zeros.
    """
    order = tf.argsort(indices, axis=1, stable=True)
    indices, cotangents = (tf.gather(tensor, order, batch_dims=1) for tensor in (indices, cotangents))
    shape = tf.shape(indices)
    batch, lookups = shape[0], shape[1]
    changes = tf.pad(tf.cast(indices[:, 1:] != indices[:, :-1], tf.int32), [[0, 0], [1, 0]])
    segments = tf.reshape(tf.cumsum(changes, axis=1) + tf.range(batch)[:, tf.newaxis] * lookups, [-1])
    count = batch * lookups
    values = tf.math.unsorted_segment_sum(tf.reshape(cotangents, [-1, cotangents.shape[-1]]), segments, count)
    # An unused segment has the lowest integer as its index; clipped to 0, it adds zeros there.
    return tf.maximum(tf.math.unsorted_segment_max(tf.reshape(indices, [-1]), segments, count), 0), values


def concatenate_lookups(calls: Sequence[Call]) -> tuple[tf.Tensor, tf.Tensor]:
    """Each example's indices over all calls, `(batch, lookups)`, and their cotangents, `(batch, lookups, width)`."""
    indices = tf.concat([_merge_lookups(tf.cast(call.input, tf.int32), 0) for call in calls], 1)
    # As in Keras, negative indices count from the end.
    indices = tf.where(indices < 0, indices + calls[0].layer.input_dim, indices)
    return indices, tf.concat([_merge_lookups(call.cotangent, 1) for call in calls], 1)


def _merge_lookups(tensor: tf.Tensor, trailing: int) -> tf.Tensor:
    """Merges the axes between the batch and the `trailing` last ones into one, of size 1 if there are none."""
    shape = tf.shape(tensor)
    width = tensor.shape[-1] if trailing else 1
    size = -1 if None in tensor.shape[1:] else int(tensor.shape[1:].num_elements() // width)
    return tf.reshape(tensor, tf.concat([shape[:1], [size], shape[tensor.shape.rank - trailing :]], 0))


@register_rule(*REVERSIBLE_EMBEDDINGS)
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
        """The quantity of each table: the sum of all parts for a tied table, or else each table's own part.

        Args:
            calls: The calls.
            table: The quantity of the lookups, in a list that is empty if there are none.
            scores: The quantity of the scorings, likewise.
            transpose: Transposes a quantity of the table to the shape of the reverse table, and back.
        """
        # The reverse table of an untied layer is transposed.
        by_weight = [table + scores] if calls[0].layer.tie_weights else [table, list(map(transpose, scores))]
        parts = [[tf.convert_to_tensor(part) for part in parts] for parts in by_weight]
        # A table that isn't used gets zeros.
        if not all(parts):
            zeros = tf.zeros_like(next(terms[0] for terms in parts if terms))
            parts = [terms or [transpose(zeros)] for terms in parts]
        return [tf.add_n(terms) for terms in parts]


def _split_calls(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Splits the calls into lookups and scorings, which are called with `reverse`, the second argument."""
    parts: tuple[list[Call], list[Call]] = [], []
    for call in calls:
        parts[bool(call.keywords.get("reverse", (*call.arguments[1:], False)[0]))].append(call)
    return parts


def _concatenate_scores(calls: Sequence[Call]) -> tuple[tf.Tensor, tf.Tensor]:
    """The cotangents of the scores, `(batch, scores, words)`, and the inputs scored, `(batch, scores, width)`."""
    cotangents = [_merge_lookups(_cotangent_before_cap(call), 1) for call in calls]
    return tf.concat(cotangents, 1), tf.concat([_merge_lookups(call.input, 1) for call in calls], 1)


def _cotangent_before_cap(call: Call) -> tf.Tensor:
    """The cotangent of the scores; with a cap, Keras returns `cap * tanh(scores / cap)` in place of the scores."""
    if call.layer.logit_soft_cap is None:
        return call.cotangent
    capped = tf.cast(call.outputs[0], call.cotangent.dtype) / call.layer.logit_soft_cap
    return call.cotangent * (1 - tf.square(capped))
