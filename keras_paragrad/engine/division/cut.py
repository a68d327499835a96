"""Chooses the rows of a first batch that stand for a whole batch, and cuts them into parts."""

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

# The most parts of a batch in a proof.
MOST_PARTS = 8


class RowCut(NamedTuple):
    """Rows that are computed whole and in parts.

    Attributes:
        rows: For each row of the whole, its index in the first batch.
        bounds: For each part, the index in the whole of its first row, and of the row after its last.
    """

    rows: np.ndarray
    bounds: list[tuple[int, int]]

    @classmethod
    def of_parts(cls, count: int, size: int, parts: int) -> "RowCut":
        """Cuts a whole batch into parts of `size` rows, given `count` available rows.

        Missing rows are drawn from the available ones: parts with equal rows have equal weights under any weighting.
        """
        total = size * min(parts, MOST_PARTS)
        missing = np.random.default_rng(0).integers(0, count, max(total - count, 0))
        rows = np.concatenate([np.arange(min(total, count)), missing])
        return cls(rows, [(start, start + size) for start in range(0, total, size)])

    @classmethod
    def of_part(cls, size: int) -> "RowCut":
        """Cuts half of one part, which leaves room for copies, into two parts of different sizes."""
        count = max(size // 2, 2)
        first = min(count // 2 + 1, count - 1)
        return cls(np.arange(count), [(0, first), (first, count)])

    def take(self, nested: Structure) -> Structure:
        """Takes the rows of the whole from nested tensors."""
        if row_count(nested) == len(self.rows) == self.rows[-1] + 1:
            # No copy: it may not fit.
            return nested
        return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, self.rows), nested)


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches; leaves out those whose rows have other shapes than the first batch's (other padding)."""

    def shapes(batch: Batch) -> list[Any]:
        return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in keras.tree.flatten(batch)]

    alike = [batch for batch in batches if shapes(batch) == shapes(batches[0])]
    if len(alike) == 1:
        return alike[0]
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else tf.concat(leaves, 0), *alike)


def local_rows(batch: Batch) -> Batch:
    """Joins a batch's rows on this process's replicas into dense tensors; `None` if it holds anything but tensors."""
    leaves = [local_replica_values(leaf) for leaf in keras.tree.flatten(batch)]
    parts = [value for values in leaves for value in values if value is not None]
    if not all(isinstance(part, tf.Tensor) and part.shape.rank and part.dtype != tf.string for part in parts):
        return None
    joined = [tf.concat(values, 0) if len(values) > 1 and values[0] is not None else values[0] for values in leaves]
    return keras.tree.pack_sequence_as(batch, joined)


def part_size(model: keras.Model, stages: Stages, batch: Batch) -> tuple[int, int]:
    """The number of rows of a part, a slice or else a replica's share, and the number of parts of an update."""
    leaf = next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    size = max(int(rows_of(value)) for value in local_replica_values(leaf))
    parts = model.distribute_strategy.num_replicas_in_sync
    if stages.split:
        rows = stages.split.part_rows(size)
        size, parts = rows, parts * -(-size // rows)
    return size, parts * (stages.apply.batches if stages.apply else 1)
