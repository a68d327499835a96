"""The collectives between shards: all-gather and reduce-scatter, of tensors and of looked-up rows."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

from keras_paragrad.compat.collectives import are_local, replica_count, replica_index, sum_over_replicas
from keras_paragrad.storage.partition import Partition

_OUTSIDE = "An embedding is asked for rows that its table does not have. Rows of the table, and rows asked for:"


def all_gather(shard: tf.Tensor) -> tf.Tensor:
    """All replicas' shards, one after the other, on each replica; called on every replica."""
    if are_local():
        return _exchanged(lambda shards, index: tf.concat(shards, 0), shard)
    context: Any = tf.distribute.get_replica_context()
    # Without the identity, a multi-worker strategy finds no device to gather to.
    return context.all_gather(tf.identity(shard), axis=0)


def reduce_scatter(gradients: Sequence[Any], partitions: Sequence[Partition]) -> list[tf.Tensor]:
    """This replica's shard of the sum of all replicas' gradients; called on every replica.

    Args:
        gradients: Whole ones, dense or `tf.IndexedSlices`.
        partitions: How each of their variables is cut.
    """
    if are_local():
        # Each by itself: a gradient can be let go of as soon as it is computed.
        return [_scattered(*pair) for pair in zip(gradients, partitions, strict=True)]
    index = replica_index()
    # TensorFlow's reduce-scatter hangs between CPUs, so the sums are all-reduced and cut.
    sums = sum_over_replicas([tf.identity(each) if tf.is_tensor(each) else each for each in gradients])
    return [_summed([total], index, partition) for total, partition in zip(sums, partitions, strict=True)]


def _scattered(gradient: Any, partition: Partition) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return _exchanged(lambda found, index: _summed(found, index, partition), gradient)
    # Cut on the device that has it: each of the others is sent its shard alone.
    return _exchanged(
        lambda found, index: tf.add_n([shards[index] for shards in found]), partition.every_shard(gradient)
    )


def looked_up(table: tf.Tensor, indices: tf.Tensor, partition: Partition) -> tf.Tensor:
    """The rows of a sharded matrix that this replica asks for; called on every replica.

    Each replica looks up in its shard what any of them asks for, so that rows travel and shards don't.

    Args:
        table: This replica's shard, flat.
        indices: A vector of row numbers.
        partition: How the matrix is cut, between rows.
    """
    width = partition.shape[1]
    rows = partition.size // width
    indices = _checked(indices, partition)
    if are_local():

        def asked(found: Sequence[Any], index: int) -> tf.Tensor:
            tables = [each for each, _ in found]
            wanted = found[index][1]
            return tf.add_n([_rows_in(each, place, wanted, rows, width) for place, each in enumerate(tables)])

        return _exchanged(asked, (table, indices))
    context: Any = tf.distribute.get_replica_context()
    counts = context.all_gather(tf.reshape(tf.size(indices), [1]), axis=0)
    index = replica_index()
    everyone = context.all_gather(tf.identity(indices), axis=0)
    (found,) = sum_over_replicas([_rows_in(table, index, everyone, rows, width)])
    begin = tf.reduce_sum(counts[:index])
    return found[begin : begin + tf.size(indices)]


def _checked(indices: tf.Tensor, partition: Partition) -> tf.Tensor:
    """Row numbers, or an error as `tf.gather` makes it on CPUs: a row that no shard has would be zeros."""
    inside = tf.logical_and(indices >= 0, indices < partition.shape[0])
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(inside), [_OUTSIDE, partition.shape[0], indices])]):
        return tf.identity(indices)


def _rows_in(table: tf.Tensor, place: int, indices: tf.Tensor, rows: int, width: int) -> tf.Tensor:
    """Rows from one shard; zeros for those that lie in others."""
    local = indices - place * rows
    inside = tf.logical_and(local >= 0, local < rows)
    found = tf.gather(tf.reshape(table, [rows, width]), tf.where(inside, local, tf.zeros_like(local)))
    return tf.where(inside[:, tf.newaxis], found, tf.zeros_like(found))


def _summed(gradients: Sequence[Any], index: int, partition: Partition) -> tf.Tensor:
    """A shard of a sum of gradients."""
    if not all(isinstance(each, tf.IndexedSlices) for each in gradients):
        return tf.add_n([partition.shard(tf.convert_to_tensor(each), index) for each in gradients])
    values = tf.concat([each.values for each in gradients], 0)
    indices = tf.concat([each.indices for each in gradients], 0)
    if partition.rows is None:
        whole = tf.math.unsorted_segment_sum(values, indices, partition.shape[0])
        return partition.shard(whole, index)
    local = indices - index * partition.rows
    # Rows of other shards have a number that is left out of the sum.
    local = tf.where(tf.logical_and(local >= 0, local < partition.rows), local, -tf.ones_like(local))
    return tf.reshape(tf.math.unsorted_segment_sum(values, local, partition.rows), [-1])


def _exchanged(make: Callable[[Sequence[Any], int], tf.Tensor], value: Any) -> tf.Tensor:
    """Makes each replica's result, on its device, of what all replicas in this process have."""

    def merged(strategy: tf.distribute.Strategy, grouped: Any) -> PerReplica:
        local = strategy.experimental_local_results
        parts = [tf.nest.map_structure(lambda each, k=k: local(each)[k], grouped) for k in range(replicas)]
        made = []
        for index, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                made.append(make(parts, index))
        return PerReplica(made)

    replicas = replica_count()
    return tf.distribute.get_replica_context().merge_call(merged, args=(value,))
