"""Collectives between shards: all-gather, reduce-scatter and the lookup of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

from keras_paragrad.compat.collectives import replica_index, replicas_are_local, sum_over_replicas
from keras_paragrad.compat.types import GradientTensor, Structure
from keras_paragrad.storage.partition import Partition

_NO_SUCH_ROW = "An embedding is asked for rows that its table does not have. Rows of the table, and rows asked for:"


def all_gather(shard: tf.Tensor) -> tf.Tensor:
    """The shards of all replicas, concatenated, on each replica; called on every replica."""
    if replicas_are_local():
        return _exchange(lambda shards, index: tf.concat(shards, 0), shard)
    context: Any = tf.distribute.get_replica_context()
    # Without the identity, a multi-worker strategy finds no device to gather to.
    return context.all_gather(tf.identity(shard), axis=0)


def reduce_scatter(gradients: Sequence[GradientTensor], partitions: Sequence[Partition]) -> list[tf.Tensor]:
    """This replica's shards of the sums of all replicas' gradients; called on every replica.

    Args:
        gradients: Gradients of whole variables, dense or `tf.IndexedSlices`.
        partitions: The partition of each variable.
    """
    if replicas_are_local():
        # One by one: a gradient is freed as soon as it is scattered.
        return [_scatter(*pair) for pair in zip(gradients, partitions, strict=True)]
    index = replica_index()
    # TensorFlow's reduce-scatter hangs between CPUs, so this all-reduces and takes the shard.
    sums = sum_over_replicas([tf.identity(each) if tf.is_tensor(each) else each for each in gradients])
    return [_sum_shards([total], index, partition) for total, partition in zip(sums, partitions, strict=True)]


def look_up_rows(table: tf.Tensor, indices: tf.Tensor, partition: Partition) -> tf.Tensor:
    """Rows of a sharded matrix, for each replica those that it asks for; called on every replica.

    Each replica looks up in its shard the rows that any replica asks for, so rows are sent and not shards.

    Args:
        table: This replica's shard, flat.
        indices: A vector of row numbers.
        partition: The partition of the matrix, between rows.
    """
    width = partition.shape[1]
    rows = partition.size // width
    indices = _check_rows(indices, partition)
    if replicas_are_local():

        def look_up(requests: Sequence[tf.Tensor], index: int) -> tf.Tensor:
            wanted = requests[index][1]
            return tf.add_n([_rows_in(shard, at, wanted, rows, width) for at, (shard, _) in enumerate(requests)])

        return _exchange(look_up, (table, indices))
    context: Any = tf.distribute.get_replica_context()
    counts = context.all_gather(tf.reshape(tf.size(indices), [1]), axis=0)
    index = replica_index()
    all_indices = context.all_gather(tf.identity(indices), axis=0)
    (all_rows,) = sum_over_replicas([_rows_in(table, index, all_indices, rows, width)])
    begin = tf.reduce_sum(counts[:index])
    return all_rows[begin : begin + tf.size(indices)]


def _scatter(gradient: GradientTensor, partition: Partition) -> tf.Tensor:
    """This replica's shard of the sum of all local replicas' gradients."""
    if isinstance(gradient, tf.IndexedSlices):
        return _exchange(lambda gradients, index: _sum_shards(gradients, index, partition), gradient)
    # Divided on the device that has it, so each of the others is sent only its shard.
    return _exchange(
        lambda replicas, index: tf.add_n([shards[index] for shards in replicas]), partition.all_shards(gradient)
    )


def _check_rows(indices: tf.Tensor, partition: Partition) -> tf.Tensor:
    """Fails as `tf.gather` does on CPUs: a row that no shard has would be zeros."""
    exist = tf.reduce_all(tf.logical_and(indices >= 0, indices < partition.shape[0]))
    with tf.control_dependencies([tf.debugging.Assert(exist, [_NO_SUCH_ROW, partition.shape[0], indices])]):
        return tf.identity(indices)


def _rows_in(shard: tf.Tensor, index: int, indices: tf.Tensor, rows: int, width: int) -> tf.Tensor:
    """The rows that one shard has, and zeros for those of others."""
    local = indices - index * rows
    inside = tf.logical_and(local >= 0, local < rows)
    values = tf.gather(tf.reshape(shard, [rows, width]), tf.where(inside, local, tf.zeros_like(local)))
    return tf.where(inside[:, tf.newaxis], values, tf.zeros_like(values))


def _sum_shards(gradients: Sequence[tf.Tensor], index: int, partition: Partition) -> tf.Tensor:
    """One shard of a sum of gradients."""
    if not all(isinstance(each, tf.IndexedSlices) for each in gradients):
        return tf.add_n([partition.shard(tf.convert_to_tensor(each), index) for each in gradients])
    values = tf.concat([each.values for each in gradients], 0)
    indices = tf.concat([each.indices for each in gradients], 0)
    if partition.rows is None:
        whole = tf.math.unsorted_segment_sum(values, indices, partition.shape[0])
        return partition.shard(whole, index)
    local = indices - index * partition.rows
    # A negative segment is left out of the sum.
    local = tf.where(tf.logical_and(local >= 0, local < partition.rows), local, -tf.ones_like(local))
    return tf.reshape(tf.math.unsorted_segment_sum(values, local, partition.rows), [-1])


def _exchange(compute: Callable[[Sequence[Any], int], tf.Tensor], value: Structure) -> tf.Tensor:
    """Computes each replica's result, on its device, from the values of all replicas in this process."""

    def merge(strategy: tf.distribute.Strategy, grouped: Any) -> PerReplica:
        local = strategy.experimental_local_results
        values = [
            tf.nest.map_structure(lambda each, k=k: local(each)[k], grouped)
            for k in range(strategy.num_replicas_in_sync)
        ]
        results = []
        for index, device in enumerate(strategy.extended.worker_devices):
            with tf.device(device):
                results.append(compute(values, index))
        return PerReplica(results)

    return tf.distribute.get_replica_context().merge_call(merge, args=(value,))
