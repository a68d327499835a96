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
    agree(strategy, {"checksum": _checksum_of_layout(source)}, "nesting, types or shapes of the data")
    if policy == "data":
        _agree_on_content(strategy, source)
        return source.steps
    if policy == "file":
        return None
    steps = gather(strategy, np.array([-1 if source.steps is None else source.steps], np.int64))
    return None if (steps < 0).any() else int(steps.max())


def _agree_on_content(strategy: tf.distribute.Strategy, source: Source) -> None:
    """Raises on every worker if their numbers of rows and batches, or their first batches, differ."""
    counts = {"examples": source.rows, "batches": source.steps, "rows per batch": source.batch_size}
    agree(strategy, {name: -1 if count is None else count for name, count in counts.items()}, "data")
    agree(strategy, {"checksum": checksum(source.first_batch())}, "first batches of data", SEED_IT)


def checksum(batch: Batch) -> int:
    """A checksum of a batch's values."""
    total = 0
    for leaf in keras.tree.flatten(batch):
        for part in _dense_parts(leaf):
            array = np.asarray(part)
            content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            total = zlib.crc32(content, total)
    return total


def _dense_parts(leaf: Any) -> list[tf.Tensor | np.ndarray]:
    """The dense arrays or tensors that a leaf consists of."""
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
    """A checksum of the source's structure, dtypes and shapes of rows."""

    # Without the number of rows, which is compared on its own.
    def without_rows(spec: Any) -> Any:
        known = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        return repr((spec.dtype.name, tuple(spec.shape[1:]))) if known else spec

    layout = tf.nest.map_structure(without_rows, source.batches(0).element_spec)
    return zlib.crc32(repr(layout).encode())


# Capacity of the log, in batches: more than are ever prefetched.
_CAPACITY = 4096
# An odd number, so that products keep all bits.
_FACTOR = 6364136223846793005


class Tally:
    """Records the shapes and dtypes of batches as they are read, before they are sharded.

    Batches are prefetched, and which one was the last to be trained on is known only afterwards: so each is recorded
    with a checksum of all batches up to it. Iterators over the data are numbered; a reading is the number of one.
    """

    def __init__(self):
        self._reading = 0
        # A row for each batch: the reading, the batch's index, and the checksum.
        self._log: Any = None
        # The newest reading, for the graph.
        self._reading_variable: Any = None

    def begin(self) -> None:
        """Call when a new iterator is created, before it is read."""
        self._reading += 1
        if self._reading_variable is not None:
            self._reading_variable.assign(self._reading)

    @property
    def reading(self) -> int:
        """The number of the newest iterator."""
        return self._reading

    def recorded(self, batches: Dataset) -> Dataset:
        """The batches, each recorded as it is read."""
        if self._log is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._reading_variable = tf.Variable(tf.constant(self._reading, tf.int64), trainable=False)
                self._log = tf.Variable(tf.zeros((_CAPACITY, 3), tf.int64), trainable=False)
        layout = zlib.crc32(repr(batches.element_spec).encode())
        start = (tf.constant(0, tf.int64), tf.constant(layout, tf.int64))

        # AutoGraph takes longer to convert this than tracing takes.
        @tf.autograph.experimental.do_not_convert
        def record(state: Any, batch: Batch) -> tuple[tuple[tf.Tensor, ...], Batch]:
            # The index of the batch, and the checksum of the layout and of the sizes of all batches before it.
            index, total = state
            for size in _sizes(batch):
                total = (total ^ tf.cast(size, tf.int64)) * _FACTOR
            entry = tf.stack([self._reading_variable.read_value(), index, total])
            stored = tf.raw_ops.ResourceScatterUpdate(
                resource=self._log.handle, indices=index % _CAPACITY, updates=entry
            )
            with tf.control_dependencies([stored] if stored is not None else []):
                return (index + 1, tf.identity(total)), batch

        return batches.scan(start, record)

    def up_to(self, reading: int, batches: int) -> tuple[int, int]:
        """How many of the first `batches` of a reading were read, and the checksum of their shapes."""
        if self._log is None or not batches:
            return 0, 0
        log = self._log.numpy()
        entries = log[(log[:, 0] == reading) & (log[:, 1] < batches)]
        if not len(entries):
            return 0, 0
        last = entries[entries[:, 1].argmax()]
        return int(last[1]) + 1, int(last[2])


def _sizes(batch: Batch) -> list[tf.Tensor]:
    """The dynamic sizes in a batch's shapes, as scalars."""
    sizes = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            sizes += [*tf.unstack(leaf.dense_shape, num=leaf.shape.rank), tf.shape(leaf.values)[0]]
        elif isinstance(leaf, tf.RaggedTensor):
            sizes += [leaf.nrows(), *(tf.shape(splits)[0] for splits in leaf.nested_row_splits[1:])]
            sizes += [tf.shape(leaf.flat_values)[0]]
        elif isinstance(leaf, tf.Tensor) and not leaf.shape.is_fully_defined():
            sizes += [tf.rank(leaf), tf.reduce_sum(_weighted(leaf))]
    return sizes


def _weighted(leaf: tf.Tensor) -> tf.Tensor:
    """A tensor's sizes, each times a number of its axis, so that their sum depends on their order."""
    shape = tf.shape(leaf, out_type=tf.int64)
    return shape * (tf.range(tf.size(shape, out_type=tf.int64)) * 2654435761 + 40503)
