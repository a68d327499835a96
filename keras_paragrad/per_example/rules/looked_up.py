"""Per-example gradients that are rows of a table, looked up by index."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.factored_gradients import Factors

# Up to this many lookups, comparing all pairs is faster than sorting.
FEW_LOOKUPS = 128


class LookedUp(NamedTuple):
    """Each example's gradient of a table, nonzero only in the rows that it looked up.

    Attributes:
        indices: Which rows, `(batch, lookups)`; one that is looked up twice gets the sum.
        cotangents: Their gradients, `(batch, lookups, width)`.
        size: Rows of the table.
    """

    indices: tf.Tensor
    cotangents: tf.Tensor
    size: int

    def factors(self) -> Factors:
        """The gradients as the rows looked up."""
        return Factors((self.indices, self.cotangents), _Table(self.size))

    def gradients_to_keep(self) -> Any:
        """The gradients, as `Factors` where these take less memory."""
        return self.factors().materialized() if (self.indices.shape[1] or 0) > self.size else self.factors()

    def squared_norms(self) -> tf.Tensor:
        """The squared norm of each example's gradient, `(batch,)`."""
        indices, cotangents = self.indices, self.cotangents
        if (indices.shape[1] or FEW_LOOKUPS + 1) <= FEW_LOOKUPS:
            same = tf.cast(indices[:, :, tf.newaxis] == indices[:, tf.newaxis], cotangents.dtype)
            return tf.reduce_sum(same * tf.matmul(cotangents, cotangents, transpose_b=True), [1, 2])
        squares = tf.reduce_sum(tf.square(self._summed().values), 1)
        return tf.reduce_sum(tf.reshape(squares, tf.shape(indices)), 1)

    def second_moment(self) -> tf.Tensor:
        """The sum over examples of squared gradients, `(size, width)`."""
        rows = self._summed()
        return tf.math.unsorted_segment_sum(tf.square(rows.values), rows.indices, self.size)

    def weighted_sum(self, weights: tf.Tensor) -> tf.IndexedSlices:
        """The sum over examples of gradients times `weights` `(batch,)`, of shape `(size, width)`."""
        width: Any = self.cotangents.shape[-1]
        values = tf.reshape(self.cotangents * weights[:, tf.newaxis, tf.newaxis], [-1, width])
        return tf.IndexedSlices(values, tf.reshape(self.indices, [-1]), tf.constant([self.size, width]))

    def _summed(self) -> "_Rows":
        """The rows, summed for each example and index, and padded with zeros."""
        indices, cotangents = self.indices, self.cotangents
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


class _Rows(NamedTuple):
    """The nonzero rows of the per-example gradients of the table.

    Attributes:
        indices: Which row of the table it is, `(count,)`.
        values: Its gradient, `(count, width)`.
    """

    indices: tf.Tensor
    values: tf.Tensor


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


def _one_axis(tensor: tf.Tensor, kept: int) -> tf.Tensor:
    """Merges the axes between the batch and the last `kept` into one, of size 1 if there are none."""
    shape = tf.shape(tensor)
    size = -1 if None in tensor.shape[1:] else int(tensor.shape[1:].num_elements() // (tensor.shape[-1] if kept else 1))
    return tf.reshape(tensor, tf.concat([shape[:1], [size], shape[tensor.shape.rank - kept :]], 0))
