"""Embeddings, also reversible, with and without LoRA: an example's gradient of lookups is zero in all other rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import REVERSIBLE_EMBEDDINGS
from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Factors, Pick, Rule, RuleCase, register_rule
from keras_paragrad.per_example.rules.linear import Product
from keras_paragrad.per_example.rules.low_rank import drop_group_axis, make_with_lora

# Up to this many lookups, comparing all pairs is faster than sorting.
FEW_LOOKUPS = 128


class TableGradients(NamedTuple):
    """Each example's gradient of a table, nonzero only in the rows that it looked up.

    Attributes:
        indices: The rows, `(batch, lookups)`; one that is looked up twice gets the sum.
        cotangents: Their gradients, `(batch, lookups, width)`.
        size: Rows of the table.
    """

    indices: tf.Tensor
    cotangents: tf.Tensor
    size: int

    def factors(self) -> Factors:
        """The gradients as the rows looked up."""
        return Factors((self.indices, self.cotangents), _TableLayout(self.size))

    def gradients_to_keep(self) -> tf.Tensor | Factors:
        """The gradients, as `Factors` where these take less memory."""
        return self.factors().materialized() if (self.indices.shape[1] or 0) > self.size else self.factors()

    def squared_norms(self) -> tf.Tensor:
        """The squared norm of each example's gradient, `(batch,)`."""
        indices, cotangents = self.indices, self.cotangents
        if (indices.shape[1] or FEW_LOOKUPS + 1) <= FEW_LOOKUPS:
            same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], cotangents.dtype)
            return tf.reduce_sum(same * tf.matmul(cotangents, cotangents, transpose_b=True), [1, 2])
        _, values = self._sum_duplicates()
        return tf.reduce_sum(tf.reshape(tf.reduce_sum(tf.square(values), 1), tf.shape(indices)), 1)

    def second_moment(self) -> tf.Tensor:
        """The sum over examples of squared gradients, `(size, width)`."""
        indices, values = self._sum_duplicates()
        return tf.math.unsorted_segment_sum(tf.square(values), indices, self.size)

    def weighted_sum(self, weights: tf.Tensor) -> tf.IndexedSlices:
        """The sum over examples of gradients times `weights` `(batch,)`, of shape `(size, width)`."""
        width: Any = self.cotangents.shape[-1]
        values = tf.reshape(self.cotangents * weights[:, tf.newaxis, tf.newaxis], [-1, width])
        return tf.IndexedSlices(values, tf.reshape(self.indices, [-1]), tf.constant([self.size, width]))

    def _sum_duplicates(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums the cotangents of equal indices in each example: indices `(count,)` and sums `(count, width)`.

        Each example has as many entries as lookups: the sums first, in sorted order, and then zeros.
        """
        order = tf.argsort(self.indices, axis=1, stable=True)
        indices, cotangents = (tf.gather(tensor, order, batch_dims=1) for tensor in (self.indices, self.cotangents))
        shape = tf.shape(indices)
        batch, lookups = shape[0], shape[1]
        changes = tf.pad(tf.cast(indices[:, 1:] != indices[:, :-1], tf.int32), [[0, 0], [1, 0]])
        segments = tf.reshape(tf.cumsum(changes, axis=1) + tf.range(batch)[:, tf.newaxis] * lookups, [-1])
        count = batch * lookups
        values = tf.math.unsorted_segment_sum(tf.reshape(cotangents, [-1, cotangents.shape[-1]]), segments, count)
        # An unused segment has the lowest integer as its index; clipped to 0, it adds zeros there.
        return tf.maximum(tf.math.unsorted_segment_max(tf.reshape(indices, [-1]), segments, count), 0), values


class _TableLayout(NamedTuple):
    """The layout of table gradients stored as the rows looked up, which may repeat."""

    size: int

    def __call__(self, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        batch, width = tf.shape(indices)[0], values.shape[-1]
        segments = tf.reshape(indices + tf.range(batch)[:, tf.newaxis] * self.size, [-1])
        rows = tf.math.unsorted_segment_sum(tf.reshape(values, [-1, width]), segments, batch * self.size)
        return tf.reshape(rows, [-1, self.size, width])


class LowRankEmbedding(Rule):
    """The table is E + s A B. The gradient of A, as narrow as the rank, is nonzero in the rows looked up. The gradient
    of B is a dense layer's, sum_t (s A[i_t]) d_t'."""

    formula = r"the rows looked up of $s \delta B^\top$, and $s \sum_t A_{i_t} \delta_t^\top$"
    norms_without_gradients = "of $A$ always; of $B$ where that is cheaper"
    configuration = "with LoRA"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        make = functools.partial(layer, input_dim=9, output_dim=pick([3, 1, 4]))
        shape, vocabulary = pick([(7,), (), (1,), (2, 5)]), pick([2, 9])
        return RuleCase(make_with_lora(make, pick([2, 1, 5]), pick([3.0, 2.0])), shape, vocabulary)

    def suits(self, layer: keras.layers.Layer) -> bool:
        return layer.lora_enabled and super().suits(layer)

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [layer.lora_embeddings_a, layer.lora_embeddings_b]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        table, product = _factor_gradients(calls)
        return [table.factors().materialized(), drop_group_axis(product.gradients())]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        table, product = _factor_gradients(calls)
        return [table.gradients_to_keep(), drop_group_axis(product.gradients())]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        table, product = _factor_gradients(calls)
        return [table.squared_norms(), product.squared_norms(calls[0].by_xla)]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        table, product = _factor_gradients(calls)
        return [table.second_moment(), drop_group_axis(product.second_moment())]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        table, product = _factor_gradients(calls)
        # Dense, like the plain gradient of A, which is multiplied by B before rows are looked up.
        return [tf.convert_to_tensor(table.weighted_sum(weights)), drop_group_axis(product.weighted_sum(weights))]


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

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [layer.embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_table_gradients(calls).factors().materialized()]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        return [_table_gradients(calls).gradients_to_keep()]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_table_gradients(calls).squared_norms()]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [_table_gradients(calls).second_moment()]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        return [_table_gradients(calls).weighted_sum(weights)]


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


def _table_gradients(calls: Sequence[Call]) -> TableGradients:
    return TableGradients(*concatenate_lookups(calls), calls[0].layer.input_dim)


def _factor_gradients(calls: Sequence[Call]) -> tuple[TableGradients, Product]:
    """The per-example gradients of LoRA's A, as a table's, and of B, as a product that isn't computed yet."""
    layer = calls[0].layer
    indices, cotangents = concatenate_lookups(calls)
    a, b = (
        tf.cast(tf.convert_to_tensor(factor.value), cotangents.dtype)
        for factor in (layer.lora_embeddings_a, layer.lora_embeddings_b)
    )
    scale = layer.lora_alpha / layer.lora_rank
    table = TableGradients(indices, scale * tf.einsum("btq,rq->btr", cotangents, b), layer.input_dim)
    return table, Product(tf.expand_dims(scale * tf.gather(a, indices), 1), tf.expand_dims(cotangents, 1))


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
    cotangents = [_merge_positions(_cotangent_before_cap(call)) for call in calls]
    return tf.concat(cotangents, 1), tf.concat([_merge_positions(call.input) for call in calls], 1)


def _cotangent_before_cap(call: Call) -> tf.Tensor:
    """The cotangent of the scores; with a cap, Keras returns `cap * tanh(scores / cap)` in place of the scores."""
    if call.layer.logit_soft_cap is None:
        return call.cotangent
    capped = tf.cast(call.outputs[0], call.cotangent.dtype) / call.layer.logit_soft_cap
    return call.cotangent * (1 - tf.square(capped))


def _merge_positions(tensor: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(tensor)
    return tf.reshape(tensor, tf.stack([shape[0], -1, tensor.shape[-1]]))
