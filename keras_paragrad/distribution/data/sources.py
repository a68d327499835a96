"""Sources of global batches: arrays or batched streams, read in an order that is the same on every worker."""

import abc
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import (
    Adapter,
    ArrayRows,
    first_batch,
    is_grain,
    random_seed,
    read_once,
    rows_of_batches,
)
from keras_paragrad.compat.types import Batch, Dataset
from keras_paragrad.compat.workers import gather
from keras_paragrad.engine.replicas.prepared import use_enqueuer_per_iterator


def row_order(rows: int, batch_size: int, shuffle: bool | str, seed: int, epoch: int) -> np.ndarray:
    """The indices of the rows, in the order of an epoch.

    Example:

    >>> row_order(6, 2, False, seed=0, epoch=0)
    array([0, 1, 2, 3, 4, 5])
    >>> sorted(row_order(6, 2, True, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    generator = np.random.default_rng((seed, epoch))
    if shuffle == "batch":
        starts = range(0, rows, batch_size)
        parts = [start + generator.permutation(min(batch_size, rows - start)) for start in starts]
        return np.concatenate(parts).astype(np.int64)
    return generator.permutation(rows).astype(np.int64) if shuffle else np.arange(rows, dtype=np.int64)


def common_seed(strategy: tf.distribute.Strategy, seed: int | None) -> int:
    """The first worker's seed, on all workers: `seed`, else Keras's, else a random one."""
    if seed is None:
        seed = random_seed()
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    return int(gather(strategy, np.array([seed], np.int64))[0, 0])


class ReorderedDataset(keras.utils.PyDataset):
    """The batches of a `keras.utils.PyDataset`, reshuffled for each epoch.

    Keras itself shuffles with Python's random generator, which differs between workers.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._seed = seed
        self.reorder(0)

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Batch:
        return self._dataset[self._order[index]]

    def reorder(self, epoch: int) -> None:
        """Draws the order of an epoch. Call it before the epoch is read."""
        count = self._dataset.num_batches or 0
        self._order = row_order(count, 1, True, self._seed, epoch).tolist()

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


class Source(abc.ABC):
    """Global batches, epoch after epoch.

    Attributes:
        steps: Number of batches per epoch; `None` if it is infinite, or unknown until the data is read.
        rows: Number of rows, if known.
        batch_size: Number of rows per batch, if known.
        changes: Whether each epoch needs its own dataset.
    """

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self.steps: int | None = adapter.num_batches
        self.rows: int | None = None
        self.batch_size: int | None = None
        self.changes = False

    @abc.abstractmethod
    def batches(self, epoch: int) -> Dataset:
        """The batches of an epoch."""

    def first_batch(self) -> Batch:
        """The first batch, without consuming it."""
        return first_batch(self.adapter)

    def count_batch_rows(self) -> int | None:
        """The most rows in a batch; reads the first one if nothing else says it."""
        known = [size for size in (self.batch_size, self.rows) if size]
        return min(known) if known else rows_of_batches(self.adapter)

    def reorder(self, epoch: int) -> None:  # noqa: B027  (most sources have one order)
        """Draws the order of an epoch. Call it before creating an iterator, which may serve several epochs of `fit`."""


class ArraySource(Source):
    """Batches of the rows of arrays."""

    def __init__(self, adapter: Adapter, shuffle: bool | str, seed: int, size: int):
        super().__init__(adapter)
        self._arrays = ArrayRows(adapter)
        self._shuffle = shuffle
        self._seed = seed
        self._size = size
        self.rows = self._arrays.count
        self.batch_size = size
        self.steps = -(-self._arrays.count // size)
        self.changes = bool(shuffle)

    def batches(self, epoch: int) -> Dataset:
        rows, size = self._arrays.count, self._size
        static_size = None if rows % size else size
        steps = tf.data.Dataset.range(-(-rows // size))
        order = tf.constant(row_order(rows, size, self._shuffle, self._seed, epoch)) if self._shuffle else None

        # AutoGraph takes longer to convert this than tracing takes.
        @tf.autograph.experimental.do_not_convert
        def indices_of(step: tf.Tensor) -> tf.Tensor:
            start, stop = step * size, tf.minimum((step + 1) * size, rows)
            indices = tf.range(start, stop) if order is None else order[start:stop]
            # With a static shape, steps need no branch for empty shards.
            return tf.ensure_shape(indices, [static_size])

        return self._arrays.batches(steps.map(indices_of))

    def first_batch(self) -> Batch:
        indices = tf.data.Dataset.from_tensors(tf.range(min(self._arrays.count, self._size)))
        return next(iter(self._arrays.batches(indices)))


class StreamSource(Source):
    """Batches of data that is already batched: a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator."""

    def __init__(self, adapter: Adapter, reordered: ReorderedDataset | None = None):
        super().__init__(adapter)
        self._reordered = reordered
        read_once(adapter)
        use_enqueuer_per_iterator(adapter)
        self._batches = adapter.get_tf_dataset()
        shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(self._batches.element_spec)]
        static = (shape[0] for shape in shapes if isinstance(shape, tf.TensorShape) and shape.rank)
        self.batch_size = next(static, None)

    def batches(self, epoch: int) -> Dataset:
        return self._batches

    def reorder(self, epoch: int) -> None:
        if self._reordered:
            self._reordered.reorder(epoch)


def is_endless(x: Any) -> bool:
    """Whether data is infinite."""
    if isinstance(x, tf.data.Dataset):
        return int(x.cardinality()) == tf.data.INFINITE_CARDINALITY
    if is_grain(x):
        # A `MapDataset` repeated forever has about `sys.maxsize` elements, and fewer once they are batched.
        return hasattr(x, "__len__") and len(x) > sys.maxsize // 2**20
    return isinstance(x, keras.utils.PyDataset) and x.num_batches is None
