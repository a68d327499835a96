"""Which rows of a first batch stand for a whole batch, and how they are cut into parts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.compat.workers import local_replica_values
from keras_paragrad.engine.probes.trial import row_count
from keras_paragrad.engine.replicas.replica_batch import rows_of
from keras_paragrad.engine.step.stages import Stages

# The most parts of a batch that is proved.
MOST_PARTS = 8


class RowCut(NamedTuple):
    """Rows that are computed whole and in parts.

    Attributes:
        rows: For each row of the whole, its index in the first batch.
        bounds: The first row of each part, and the one after its last.
    """

    rows: np.ndarray
    bounds: list[tuple[int, int]]

    @classmethod
    def of_parts(cls, count: int, size: int, parts: int) -> "RowCut":
        """A whole batch in parts of `size` rows, from `count` rows that there are.

        Rows that are missing are drawn from these: parts of the same rows would weigh alike by any weighting.
        """
        total = size * min(parts, MOST_PARTS)
        missing = np.random.default_rng(0).integers(0, count, max(total - count, 0))
        rows = np.concatenate([np.arange(min(total, count)), missing])
        return cls(rows, [(start, start + size) for start in range(0, total, size)])

    @classmethod
    def of_part(cls, size: int) -> "RowCut":
        """Half of one part, which leaves room for copies, cut into two of different sizes."""
        count = max(size // 2, 2)
        first = min(count // 2 + 1, count - 1)
        return cls(np.arange(count), [(0, first), (first, count)])

    def take(self, nested: Structure) -> Structure:
        """The rows of the whole, of nested tensors."""
        if row_count(nested) == len(self.rows) == self.rows[-1] + 1:
            # As they are: a copy may not fit.
            return nested
        return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, self.rows), nested)


def join_rows(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches as one, of those that have the shapes of the first: others are padded otherwise."""

    def shapes(batch: Batch) -> list[Any]:
        return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in keras.tree.flatten(batch)]

    alike = [batch for batch in batches if shapes(batch) == shapes(batches[0])]
    if len(alike) == 1:
        return alike[0]
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else tf.concat(leaves, 0), *alike)


def local_rows(batch: Batch) -> Batch:
    """The rows of a batch on all replicas of this process, as dense tensors; `None` if it holds anything else."""
    leaves = [local_replica_values(leaf) for leaf in keras.tree.flatten(batch)]
    parts = [value for values in leaves for value in values if value is not None]
    if not all(isinstance(part, tf.Tensor) and part.shape.rank and part.dtype != tf.string for part in parts):
        return None
    joined = [tf.concat(values, 0) if len(values) > 1 and values[0] is not None else values[0] for values in leaves]
    return keras.tree.pack_sequence_as(batch, joined)


def part_size(model: keras.Model, stages: Stages, batch: Batch) -> tuple[int, int]:
    """The rows that one part of a batch holds, and the number of parts of an update."""
    leaf = next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    size = max(int(rows_of(value)) for value in local_replica_values(leaf))
    parts = model.distribute_strategy.num_replicas_in_sync
    if stages.split:
        rows = stages.split.part_rows(size)
        size, parts = rows, parts * -(-size // rows)
    return size, parts * (stages.apply.batches if stages.apply else 1)
