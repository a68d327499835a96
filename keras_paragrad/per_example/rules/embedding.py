"""Embeddings: rows looked up by index."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.factored_gradients import Factors
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase

# Up to this many lookups, comparing all pairs is faster than sorting.
FEW_LOOKUPS = 128


class _Rows(NamedTuple):
    """The nonzero rows of the per-example gradients of the table.

    Attributes:
        indices: Which row of the table it is, `(count,)`.
        values: Its gradient, `(count, width)`.
    """

    indices: tf.Tensor
    values: tf.Tensor


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

    def variables(self, layer: Any) -> list[keras.Variable]:
        return [layer.embeddings]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        return self.gradients_of_all([call])

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [Factors.of(gradients).materialized() for gradients in self.gradients_to_keep(calls)]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        looked_up = Factors(lookups(calls), _Table(self._size(calls)))
        indices, _ = looked_up.tensors
        return [looked_up.materialized() if (indices.shape[1] or 0) > self._size(calls) else looked_up]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        indices, cotangents = lookups(calls)
        if (indices.shape[1] or FEW_LOOKUPS + 1) <= FEW_LOOKUPS:
            same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], cotangents.dtype)
            return [tf.reduce_sum(same * tf.matmul(cotangents, cotangents, transpose_b=True), [1, 2])]
        rows = _summed(calls)
        squares = tf.reduce_sum(tf.square(rows.values), 1)
        return [tf.reduce_sum(tf.reshape(squares, tf.shape(indices)), 1)]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        rows = _summed(calls)
        return [tf.math.unsorted_segment_sum(tf.square(rows.values), rows.indices, self._size(calls))]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        indices, cotangents = lookups(calls)
        weighted = cotangents * weights[:, tf.newaxis, tf.newaxis]
        values = tf.reshape(weighted, [-1, cotangents.shape[-1]])
        layer: Any = calls[0].layer
        return [tf.IndexedSlices(values, tf.reshape(indices, [-1]), tf.constant(list(layer.embeddings.shape)))]

    def _size(self, calls: Sequence[Call]) -> int:
        layer: Any = calls[0].layer
        return layer.input_dim


class _Table(NamedTuple):
    """The layout of table gradients stored as the rows looked up, which may repeat."""

    size: int

    def __call__(self, indices: Any, values: Any) -> tf.Tensor:
        batch, width = tf.shape(indices)[0], values.shape[-1]
        places = indices + tf.range(batch)[:, tf.newaxis] * self.size
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(values, [-1, width]), tf.reshape(places, [-1]), batch * self.size
        )
        return tf.reshape(rows, [-1, self.size, width])


def lookups(calls: Sequence[Call]) -> tuple[tf.Tensor, tf.Tensor]:
    """Each example's indices over all calls, `(batch, lookups)`, and their cotangents, `(batch, lookups, width)`."""
    layer: Any = calls[0].layer
    indices = tf.concat([_one_axis(tf.cast(call.input, tf.int32), 0) for call in calls], 1)
    # As in Keras, negative indices count from the end.
    indices = tf.where(indices < 0, indices + layer.input_dim, indices)
    return indices, tf.concat([_one_axis(call.cotangent, 1) for call in calls], 1)


def _summed(calls: Sequence[Call]) -> _Rows:
    """The rows, summed for each example and index, and padded with zeros."""
    indices, cotangents = lookups(calls)
    order = tf.argsort(indices, axis=1, stable=True)
    indices, cotangents = (tf.gather(each, order, batch_dims=1) for each in (indices, cotangents))
    shape = tf.shape(indices)
    batch, width = shape[0], shape[1]
    changes = tf.pad(tf.cast(indices[:, 1:] != indices[:, :-1], tf.int32), [[0, 0], [1, 0]])
    segments = tf.reshape(tf.cumsum(changes, axis=1) + tf.range(batch)[:, tf.newaxis] * width, [-1])
    count = batch * width
    values = tf.math.unsorted_segment_sum(tf.reshape(cotangents, [-1, cotangents.shape[-1]]), segments, count)
    # An unused segment has the lowest integer as its index; clipped to 0, it adds zeros there.
    numbers = tf.maximum(tf.math.unsorted_segment_max(tf.reshape(indices, [-1]), segments, count), 0)
    return _Rows(numbers, values)


def _one_axis(tensor: tf.Tensor, kept: int) -> tf.Tensor:
    """Merges the axes between the batch and the last `kept` into one, of size 1 if there are none."""
    shape = tf.shape(tensor)
    size = -1 if None in tensor.shape[1:] else int(tensor.shape[1:].num_elements() // (tensor.shape[-1] if kept else 1))
    return tf.reshape(tensor, tf.concat([shape[:1], [size], shape[tensor.shape.rank - kept :]], 0))
