"""The rows of a first batch, and how they are cut into parts."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.compat.workers import local_replica_values
from keras_paragrad.engine.batches.replica_batch import rows_of
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.trials.trial import take_rows

# The most batches of a window whose rows are proved together.
MOST_BATCHES = 8


def uneven_parts(count: int) -> list[tuple[int, int]]:
    """Cuts `count` rows, at least 2, into two parts: the first row of each, and the row after it.

    Their sizes differ, if there are more than two rows, and the first is odd: pairs have no place in it.
    """
    first = max(3 * count // 8 - 1, 0) | 1
    return [(0, first), (first, count)]


def even_parts(count: int, size: int) -> list[tuple[int, int]]:
    """Cuts `count` rows into parts of `size` rows; the last holds the rest."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches; leaves out those whose rows have other shapes than the first batch's (other padding)."""

    def shapes(batch: Batch) -> list[Any]:
        return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in keras.tree.flatten(batch)]

    alike = [batch for batch in batches if shapes(batch) == shapes(batches[0])]
    return keras.tree.map_structure(lambda *leaves: _join(leaves), *alike)


def local_rows(batch: Batch) -> Batch:
    """Joins a batch's rows on this process's replicas; `None` if a tensor has no rows."""
    leaves = [local_replica_values(leaf) for leaf in keras.tree.flatten(batch)]
    if not all(value.shape.rank for values in leaves for value in values if value is not None):
        return None
    return keras.tree.pack_sequence_as(batch, list(map(_join, leaves)))


def gather_rows(nested: Structure, order: Sequence[int]) -> Any:
    """The rows of nested tensors in another order."""

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [take_rows(leaf, row, row + 1) for row in order])
        return None if leaf is None else tf.gather(leaf, order)

    return keras.tree.map_structure(gather, nested)


def _join(leaves: Sequence[Any]) -> Any:
    if leaves[0] is None or len(leaves) == 1:
        return leaves[0]
    return tf.sparse.concat(0, list(leaves)) if isinstance(leaves[0], tf.SparseTensor) else tf.concat(leaves, 0)


def part_size(model: keras.Model, stages: Stages, batch: Batch) -> tuple[int, int]:
    """The number of rows of a part, a slice or else a replica's share, and the number of parts of an update."""
    leaf = next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    size = max(int(rows_of(value)) for value in local_replica_values(leaf))
    parts = model.distribute_strategy.num_replicas_in_sync
    if stages.split:
        rows = stages.split.part_rows(size)
        size, parts = rows, parts * -(-size // rows)
    return size, parts * (stages.apply.batches if stages.apply else 1)
