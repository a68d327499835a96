"""The shards of a global batch for each replica."""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import check_is_batched
from keras_paragrad.compat.state import warn
from keras_paragrad.compat.types import Batch, Dataset, Specs, Structure
from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.engine.batches.replica_batch import DIFFERENT_ROWS
from keras_paragrad.plain_text import counted

# AutoGraph takes longer to convert these functions than tracing takes.
_unconverted = tf.autograph.experimental.do_not_convert


def shard_batches(batches: Dataset, placement: ReplicaPlacement) -> Dataset:
    """Splits each batch into a shard for each replica, in order, and yields this worker's shards."""
    if placement.local == 1:
        take_shard = _unconverted(lambda *batch: shard(_whole(batches, batch), placement.first, placement))
        return batches.map(take_shard, num_parallel_calls=tf.data.AUTOTUNE)
    rows = _static_rows(batches.element_spec)
    if rows is not None and placement.local == placement.replicas:
        # Static bounds need no tf.function, and static shapes tell the step that no replica's shard is empty.
        bounds = [placement.first_row(rows, index) for index in range(placement.local + 1)]
        return batches.rebatch(tf.constant(np.diff(bounds), tf.int64))
    return _sharded(batches, range(placement.first, placement.first + placement.local), placement)


def shard(batch: Batch, index: tf.Tensor | int, placement: ReplicaPlacement) -> Batch:
    """The shard of a batch for the replica `index`."""
    rows = _static_rows(batch) if isinstance(index, int) else None
    if rows is None:
        rows, index = count_rows(batch), tf.cast(index, tf.int64)
    start, stop = (placement.first_row(rows, replica) for replica in (index, index + 1))
    return tf.nest.map_structure(lambda leaf: _slice(leaf, start, stop), batch)


def count_rows(batch: Batch) -> tf.Tensor:
    """The number of rows in a batch; a runtime error if its tensors disagree."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if not _is_absent(leaf)]
    counts = [_rows(leaf) for leaf in leaves]
    checks = [tf.debugging.assert_equal(count, counts[0], DIFFERENT_ROWS) for count in counts[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(counts[0])


def check_batches(spec: Specs, replicas: int, rows: int | None = None) -> None:
    """Refuses elements that can't be batches; warns if `rows`, or their own, are too few for the replicas."""
    leaves = [leaf for leaf in tf.nest.flatten(spec) if isinstance(getattr(leaf, "shape", None), tf.TensorShape)]
    if not leaves:
        raise ValueError(f"The elements of the data contain no tensors: {spec}. Pass batches such as (x, y).")
    check_is_batched(None, spec)
    sizes = [rows, *(leaf.shape[0] for leaf in leaves if leaf.shape.rank)]
    least = next((size for size in sizes if size is not None), replicas)
    if least < replicas:
        warn(
            f"A batch has {counted(least, 'row')} for {replicas} replicas, so some replicas never get one. Use batches "
            f"of at least {replicas} rows, or fewer devices. (A tf.data.Dataset has to be batched.)",
        )


def _sharded(batches: Dataset, selection: range, placement: ReplicaPlacement) -> Dataset:
    """The shards of each batch for the selected replicas, one after another."""
    indices = tf.data.Dataset.range(selection.start, selection.stop)

    @_unconverted
    def of_batch(*batch: Any) -> Dataset:
        return indices.map(_unconverted(lambda index: shard(_whole(batches, batch), index, placement)))

    return batches.flat_map(of_batch)


def _whole(batches: Dataset, arguments: tuple[Structure, ...]) -> Batch:
    """An element of a dataset; tf.data unpacks tuples into arguments."""
    return arguments if isinstance(batches.element_spec, tuple) else arguments[0]


def _is_absent(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def _static_rows(batch: Batch | Specs) -> int | None:
    """The number of rows in all tensors of a batch, or of its spec, if they are dense and it is static."""
    leaves = tf.nest.flatten(batch)
    if not all(isinstance(leaf, (tf.Tensor, tf.TensorSpec)) for leaf in leaves):
        return None
    counts = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    return counts.pop() if len(counts) == 1 else None


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _slice(leaf: Any, start: tf.Tensor | int, stop: tf.Tensor | int) -> Any:
    if _is_absent(leaf):
        return None  # As in Keras's own step, where an empty Optional becomes `None`.
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        return tf.sparse.slice(leaf, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0))
    return leaf[start:stop]
