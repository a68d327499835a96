"""How a variable is divided into shards, and the collectives between them: all-gather, reduce-scatter, row lookup."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, replicas_are_local, sum_over_replicas
from keras_paragrad.compat.private import PerReplica
from keras_paragrad.compat.types import Array, Structure

# Bytes from which a variable is sharded: below, a gather costs more than the shards save.
MIN_SHARD_BYTES = 2**14
# Rows for each replica from which a matrix is divided between rows: padding is at most one row in this many.
ROWS = 16


class Partition(NamedTuple):
    """How a variable is divided: flat shards of one size, the last ones padded with zeros.

    Attributes:
        shape: The variable's shape.
        shards: The number of shards, one for each replica of all workers.
        size: The number of elements of a shard.
    """

    shape: tuple[int, ...]
    shards: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], shards: int) -> "Partition":
        """The partition of a variable: a matrix with many rows is divided between rows."""
        sizes = tuple(int(size) for size in shape)
        if len(sizes) == 2 and sizes[0] >= ROWS * shards:
            return cls(sizes, shards, math.ceil(sizes[0] / shards) * sizes[1])
        return cls(sizes, shards, math.ceil(math.prod(sizes) / shards))

    @property
    def elements(self) -> int:
        """The number of elements of the variable."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int | None:
        """The number of rows of a shard, or `None` if a row may be in two shards."""
        if len(self.shape) == 2 and self.size % self.shape[1] == 0:
            return self.size // self.shape[1]
        return None

    def shard(self, whole: Array, index: int) -> tf.Tensor:
        """One shard of a tensor of the variable's shape."""
        flat = tf.reshape(whole, [-1])
        begin, end = (min(shard * self.size, self.elements) for shard in (index, index + 1))
        missing = self.size - (end - begin)
        return tf.pad(flat[begin:end], [[0, missing]]) if missing else flat[begin:end]

    def all_shards(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """All shards of a tensor of the variable's shape, with few operations."""
        flat, missing = tf.reshape(whole, [-1]), self.size * self.shards - self.elements
        return tf.split(tf.pad(flat, [[0, missing]]) if missing else flat, self.shards)

    def copy_shard(self, whole: tf.Tensor, index: int) -> tf.Tensor:
        """A copy of one shard, to assign: a slice would keep the whole tensor in memory."""
        return tf.raw_ops.DeepCopy(x=self.shard(whole, index))

    def shard_of_lookups(self, gradient: tf.IndexedSlices, index: int) -> tf.IndexedSlices:
        """What one shard, which is flat, gets of the gradients of lookups: each still by itself."""
        width = math.prod(self.shape[1:])
        first = tf.cast(gradient.indices, "int64")[:, tf.newaxis] * width - index * self.size
        elements = first + tf.range(width, dtype="int64")
        inside = tf.logical_and(elements >= 0, elements < self.size)
        values = tf.boolean_mask(tf.reshape(gradient.values, [-1, width]), inside)
        return tf.IndexedSlices(values, tf.boolean_mask(elements, inside), tf.constant([self.size]))

    def whole(self, padded: tf.Tensor | np.ndarray) -> tf.Tensor:
        """The tensor of the variable's shape whose shards are concatenated in `padded`."""
        flat = padded[: self.elements] if self.size * self.shards > self.elements else padded
        return tf.reshape(flat, self.shape)


_NO_SUCH_ROW = "An embedding is asked for rows that its table does not have. Rows of the table, and rows asked for:"


def all_gather(shard: tf.Tensor) -> tf.Tensor:
    """The shards of all replicas, concatenated, on each replica; called on every replica."""
    if replicas_are_local():
        return _exchange(lambda shards, index: tf.concat(shards, 0), shard)
    context: Any = tf.distribute.get_replica_context()
    # Without the identity, a multi-worker strategy finds no device to gather to.
    return context.all_gather(tf.identity(shard), axis=0)


def largest_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The largest of all replicas' values of each element, in one exchange; called on every replica."""
    flat = tf.concat([tf.reshape(tf.cast(tensor, "float32"), [-1]) for tensor in tensors], 0)
    largest = tf.reduce_max(tf.reshape(all_gather(flat), [replica_count(), -1]), 0)
    parts = tf.split(largest, [tf.size(tensor) for tensor in tensors])
    return [tf.cast(tf.reshape(part, tensor.shape), tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def reduce_scatter(gradients: Sequence[tf.Tensor], partitions: Sequence[Partition]) -> list[tf.Tensor]:
    """This replica's shards of the sums of all replicas' dense gradients; called on every replica."""
    if replicas_are_local():
        # One by one: a gradient is freed as soon as it is scattered. Each is divided on the device that holds the sum,
        # so each other device is sent only its shard.
        return [
            _exchange(
                lambda replicas, index: tf.add_n([shards[index] for shards in replicas]), partition.all_shards(gradient)
            )
            for gradient, partition in zip(gradients, partitions, strict=True)
        ]
    index = replica_index()
    # TensorFlow's reduce-scatter hangs between CPUs, so this all-reduces and takes the shard.
    sums = sum_over_replicas(list(map(tf.identity, gradients)))
    return [partition.shard(total, index) for total, partition in zip(sums, partitions, strict=True)]


def look_up_rows(table: tf.Tensor, indices: tf.Tensor, partition: Partition) -> tf.Tensor:
    """Looks up rows of a matrix that is divided between rows, different ones on each replica; called on every replica.

    Each replica looks up in `table`, its flat shard, the rows that any replica requests, so rows are sent instead of
    shards.
    """
    width = partition.shape[1]
    rows = partition.size // width
    # As `tf.gather` does on CPUs: rows outside of the table would silently read as zeros.
    exist = tf.reduce_all(tf.logical_and(indices >= 0, indices < partition.shape[0]))
    with tf.control_dependencies([tf.debugging.Assert(exist, [_NO_SUCH_ROW, partition.shape[0], indices])]):
        indices = tf.identity(indices)
    if replicas_are_local():

        def look_up(requests: Sequence[tf.Tensor], index: int) -> tf.Tensor:
            wanted = requests[index][1]
            return tf.add_n([_rows_in(shard, k, wanted, rows, width) for k, (shard, _) in enumerate(requests)])

        return _exchange(look_up, (table, indices))
    context: Any = tf.distribute.get_replica_context()
    counts = context.all_gather(tf.reshape(tf.size(indices), [1]), axis=0)
    index = replica_index()
    all_indices = context.all_gather(tf.identity(indices), axis=0)
    (all_rows,) = sum_over_replicas([_rows_in(table, index, all_indices, rows, width)])
    begin = tf.reduce_sum(counts[:index])
    return all_rows[begin : begin + tf.size(indices)]


def _rows_in(shard: tf.Tensor, index: int, indices: tf.Tensor, rows: int, width: int) -> tf.Tensor:
    """Looks up the rows that are in the shard of this index, which has `rows` rows; all others read as zeros."""
    local = indices - index * rows
    inside = tf.logical_and(local >= 0, local < rows)
    values = tf.gather(tf.reshape(shard, [rows, width]), tf.where(inside, local, tf.zeros_like(local)))
    return tf.where(inside[:, tf.newaxis], values, tf.zeros_like(values))


def _exchange(compute: Callable[[Sequence[Any], int], tf.Tensor], value: Structure) -> tf.Tensor:
    """Computes each replica's result, on its device: `compute` gets all local replicas' values, and its index."""

    def merge(strategy: tf.distribute.Strategy, grouped: Any) -> PerReplica:
        local = strategy.experimental_local_results
        values = [
            tf.nest.map_structure(lambda leaf, k=k: local(leaf)[k], grouped) for k in range(replica_count(strategy))
        ]
        results = []
        for index, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                results.append(compute(values, index))
        return PerReplica(results)

    return tf.distribute.get_replica_context().merge_call(merge, args=(value,))
