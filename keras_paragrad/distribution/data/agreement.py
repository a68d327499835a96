"""Checks that all workers are about to read the same data."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.data.sources import Source
from keras_paragrad.distribution.workers import agree, gather

SEED_IT = (
    " If the data is random, call keras.utils.set_random_seed(0) on every worker before creating it, or seed it: "
    'ds.shuffle(1000, seed=0). If every worker reads its own shard, write shard_policy="already_sharded".'
)


def common_steps(strategy: tf.distribute.Strategy, source: Source, policy: str) -> int | None:
    """The number of steps per epoch on all workers, after checking that their data agree."""
    agree(strategy, {"checksum": _checksum_of_layout(source)}, "nesting, types or shapes of the data")
    if policy == "data":
        _agree_on_content(strategy, source)
        return source.steps
    if policy == "file":
        return None
    steps = gather(strategy, np.array([-1 if source.steps is None else source.steps], np.int64))
    return None if (steps < 0).any() else int(steps.max())


def _agree_on_content(strategy: tf.distribute.Strategy, source: Source) -> None:
    counts = {"examples": source.rows, "batches": source.steps, "rows per batch": source.batch_size}
    agree(strategy, {name: -1 if count is None else count for name, count in counts.items()}, "data")
    agree(strategy, {"checksum": checksum(source.first_batch())}, "first batches of data", SEED_IT)


def checksum(batch: Any) -> int:
    """A number that is the same for the same batch."""
    total = 0
    for leaf in keras.tree.flatten(batch):
        for part in _dense_parts(leaf):
            array = np.asarray(part)
            content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            total = zlib.crc32(content, total)
    return total


def _dense_parts(leaf: Any) -> list[Any]:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return []
    if isinstance(leaf, tf.SparseTensor):
        return [leaf.indices, leaf.values]
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values, *leaf.nested_row_splits]
    if hasattr(leaf, "tocoo"):
        return [leaf.tocoo().row, leaf.tocoo().col, leaf.tocoo().data]
    return [leaf]


def _checksum_of_layout(source: Source) -> int:
    # Without the number of rows, which is compared separately.
    def without_rows(spec: Any) -> Any:
        known = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return repr((spec.dtype.name, tuple(spec.shape[1:]))) if known else spec

    layout = tf.nest.map_structure(without_rows, source.batches(0).element_spec)
    return zlib.crc32(repr(layout).encode())
