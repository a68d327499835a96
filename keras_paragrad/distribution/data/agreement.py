"""Checks that all workers read the same data, before and after an epoch."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Batch, Dataset
from keras_paragrad.compat.workers import gather
from keras_paragrad.distribution.data.sources import Source
from keras_paragrad.distribution.workers import agree

SEED_IT = (
    " If the data is random, call keras.utils.set_random_seed(0) on every worker before creating it, or seed it: "
    'ds.shuffle(1000, seed=0). If every worker reads its own shard, write shard_policy="already_sharded".'
)


def common_steps(strategy: tf.distribute.Strategy, source: Source, policy: str) -> int | None:
    """The number of steps per epoch on all workers, or `None` if it is unknown; an error if their data differ.

    Under `"already_sharded"`, it is the most of any worker.
    """

    # The number of rows is compared on its own.
    def without_rows(spec: Any) -> Any:
        known = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return repr((spec.dtype.name, tuple(spec.shape[1:]))) if known else spec

    layout = repr(tf.nest.map_structure(without_rows, source.batches(0).element_spec))
    agree(strategy, {"checksum": zlib.crc32(layout.encode())}, "nesting, types or shapes of the data")
    if policy == "data":
        counts = {"examples": source.rows, "batches": source.steps, "rows per batch": source.batch_size}
        agree(strategy, {name: -1 if count is None else count for name, count in counts.items()}, "data")
        agree(strategy, {"checksum": _checksum(source.first_batch())}, "first batches of data", SEED_IT)
        return source.steps
    steps = gather(strategy, np.array([-1 if source.steps is None else source.steps], np.int64))
    return None if (steps < 0).any() else int(steps.max())


def _checksum(batch: Batch) -> int:
    """A checksum of a batch's values."""
    total = 0
    for leaf in keras.tree.flatten(batch):
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            continue
        coo = leaf.tocoo() if hasattr(leaf, "tocoo") else None
        parts = tf.nest.flatten(leaf, expand_composites=True) if coo is None else (coo.row, coo.col, coo.data)
        for part in parts:
            array = np.asarray(part)
            content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            total = zlib.crc32(content, total)
    return total


# Capacity of the log, in batches: more than are ever prefetched.
_CAPACITY = 4096
# An odd number, so that products keep all bits.
_FACTOR = 6364136223846793005


class Tally:
    """Records the shapes and dtypes of batches as they are read, before they are sharded.

    Batches are prefetched, and which one was the last to be trained on is known only afterwards: so each is recorded
    with a checksum of all batches up to it.

    Attributes:
        reading: The number of the newest iterator over the data, from 1.
    """

    def __init__(self):
        self.reading = 0
        # A row for each batch: the reading, the batch's index, and the checksum. Beside it the reading, for the graph.
        self._log: Any = None
        self._reading_variable: Any = None

    def begin(self) -> None:
        """Call when a new iterator is created, before it is read."""
        self.reading += 1
        if self._reading_variable is not None:
            self._reading_variable.assign(self.reading)

    def recorded(self, batches: Dataset) -> Dataset:
        """The batches, each recorded as it is read."""
        if self._log is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._reading_variable = tf.Variable(tf.constant(self.reading, tf.int64), trainable=False)
                self._log = tf.Variable(tf.zeros((_CAPACITY, 3), tf.int64), trainable=False)
        layout = zlib.crc32(repr(batches.element_spec).encode())

        # AutoGraph takes longer to convert this than tracing takes.
        @tf.autograph.experimental.do_not_convert
        def record(state: Any, batch: Batch) -> tuple[tuple[tf.Tensor, ...], Batch]:
            # The index of the batch, and the checksum of the layout and of the sizes of all batches before it.
            index, total = state
            sizes = _sizes(batch)
            # Each size times a number of its place, so that the sum depends on their order.
            weights = tf.range(tf.size(sizes, tf.int64)) * 2654435761 + 40503
            total = (total ^ tf.reduce_sum(sizes * weights)) * _FACTOR
            entry = tf.stack([self._reading_variable.read_value(), index, total])
            stored = tf.raw_ops.ResourceScatterUpdate(
                resource=self._log.handle, indices=index % _CAPACITY, updates=entry
            )
            with tf.control_dependencies([stored] if stored is not None else []):
                return (index + 1, tf.identity(total)), batch

        return batches.scan((tf.constant(0, tf.int64), tf.constant(layout, tf.int64)), record)

    def up_to(self, reading: int, batches: int) -> tuple[int, int]:
        """How many of the first `batches` of a reading were read, and the checksum of their shapes."""
        log = np.zeros((0, 3), np.int64) if self._log is None else self._log.numpy()
        entries = log[(log[:, 0] == reading) & (log[:, 1] < batches)] if reading else log[:0]
        last = entries[entries[:, 1].argmax()] if len(entries) else (-1, -1, 0)
        return int(last[1]) + 1, int(last[2])


def _sizes(batch: Batch) -> tf.Tensor:
    """The sizes in the shapes of a batch's tensors, and of the dense parts of sparse and ragged tensors."""
    sizes = []
    for leaf in tf.nest.flatten(batch):
        sizes += [leaf.dense_shape] if isinstance(leaf, tf.SparseTensor) else []
        parts = tf.nest.flatten(leaf, expand_composites=True)
        sizes += [tf.shape(part, tf.int64) for part in parts if isinstance(part, tf.Tensor)]
    return tf.concat(sizes, 0)
