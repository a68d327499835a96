"""Sources of global batches: arrays or batched streams, read in an order that is the same on every worker.

Of Grain's batches, each of several workers reads its rows alone, where they have random access.
"""

import abc
import importlib
import sys
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import (
    Adapter,
    ArrayRows,
    adapter_of,
    first_batch,
    is_grain,
    random_seed,
    read_once,
    rows_of_batches,
)
from keras_paragrad.compat.types import Batch, Dataset, FitData
from keras_paragrad.compat.workers import ReplicaPlacement, gather
from keras_paragrad.engine.replicas.prepared import use_enqueuer_per_iterator


def row_order(rows: int, batch_size: int, shuffle: bool | str, seed: int, epoch: int) -> np.ndarray:
    """The indices of the rows, in the order of an epoch.

    Args:
        rows: Number of rows.
        batch_size: Number of rows per batch.
        shuffle: `True`, `"batch"` to keep every row in its batch, as in `fit`, or `False`.
        seed: The seed, combined with the epoch.
        epoch: The epoch.

    Returns:
        A permutation of `range(rows)`, int64.

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

    Args:
        dataset: The dataset, with a known number of batches.
        seed: The shuffling seed.
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

    Args:
        adapter: Keras's adapter of the data.

    Attributes:
        steps: Number of batches per epoch; `None` if it is infinite, or unknown until the data is read.
        rows: Number of rows, if known.
        batch_size: Number of rows per batch, if known.
        own_rows: Whether batches are this worker's rows alone.
        changes: Whether each epoch needs its own dataset.
    """

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self.steps: int | None = adapter.num_batches
        self.rows: int | None = None
        self.batch_size: int | None = None
        self.own_rows = False
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
    """Batches of the rows of arrays.

    Args:
        adapter: Keras's adapter of the arrays, which has their batch size.
        shuffle: As in `fit`.
        seed: The shuffling seed.
        size: Number of rows per batch.
    """

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
    """Batches of data that is already batched: a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.

    Args:
        adapter: Keras's adapter of the data.
        reordered: The dataset to shuffle before each epoch, if any.
    """

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


class PlainBatches(NamedTuple):
    """Batches that Grain stacks from consecutive elements, both with random access.

    Attributes:
        batches: The `grain.MapDataset` of the batches.
        rows: The one of the elements.
        size: Rows per batch; the last one may have fewer.
    """

    batches: Any
    rows: Any
    size: int


def plain_batches(x: FitData) -> PlainBatches | None:
    """The batches of a Grain dataset, or `None` if it transforms them, or lacks random access. Nothing is read."""
    source = _source_of_iterator(x)
    dataset, parents = (x, getattr(x, "parents", ())) if source is None else (source, source.parents)
    if not is_grain(dataset) or len(parents) != 1:
        return None
    parent = parents[0]
    rows = parent if hasattr(parent, "__len__") else _source_of_iterator(parent)
    if rows is None:
        return None
    # Grain keeps the batch size in a private attribute: try all integers, and compare with what `batch` makes of each.
    for size in {value for value in vars(dataset).values() if type(value) is int and value > 0}:
        for drop_remainder in (False, True):
            if _is_like(dataset, parent.batch(size, drop_remainder=drop_remainder)):
                try:
                    return PlainBatches(rows.batch(size, drop_remainder=drop_remainder), rows, size)
                except ValueError:  # Grain refuses it where some elements are filtered out.
                    return None
    return None


def _source_of_iterator(dataset: Any) -> Any:
    """The `MapDataset` that `to_iter_dataset()` made a dataset of, or `None`."""
    parents = getattr(dataset, "parents", ())
    if not is_grain(dataset) or len(parents) != 1 or not hasattr(parents[0], "to_iter_dataset"):
        return None
    return parents[0] if _is_like(dataset, parents[0].to_iter_dataset()) else None


def _is_like(dataset: Any, made: Any) -> bool:
    """Whether a dataset is what Grain has just made, of the same parents with the same arguments."""
    attributes = vars(dataset)
    arguments = {name: value for name, value in vars(made).items() if name.startswith("_")}
    return type(dataset) is type(made) and all(
        name in attributes and attributes[name] == value for name, value in arguments.items()
    )


class _WorkerRows:
    """The rows of each batch that the replicas of a worker get, by the index of the batch."""

    def __init__(self, batches: PlainBatches, placement: ReplicaPlacement):
        self._batches = batches
        self._placement = placement
        self._total = len(batches.rows)

    def __len__(self) -> int:
        return len(self._batches.batches)

    def __getitem__(self, index: int) -> Batch:
        _, elements, size = self._batches
        placement = self._placement
        start = index * size
        count = min(size, self._total - start)
        bounds = [placement.first_row(count, placement.first + local) for local in (0, placement.local)]
        rows = [elements[row] for row in range(start + bounds[0], start + bounds[1])]
        if any(row is None for row in rows):
            raise ValueError(
                "Elements of the Grain dataset are None, which to_iter_dataset() leaves out, so workers can't tell "
                'which rows are theirs. Leave them out by .filter(...), or write shard_policy="data".'
            )
        if not rows:
            return keras.tree.map_structure(lambda leaf: leaf[:0], _stacked([elements[start]]))
        return _stacked(rows)


def _stacked(rows: list[Any]) -> Batch:
    grain: Any = importlib.import_module("grain")
    return grain.MapDataset.source(rows).batch(len(rows))[0]


class GrainRowsSource(StreamSource):
    """This worker's rows of Grain's batches.

    Args:
        batches: All workers' batches. The first batch is read whole: the workers compare it.
        placement: The replicas of this worker.
    """

    def __init__(self, batches: PlainBatches, placement: ReplicaPlacement):
        grain: Any = importlib.import_module("grain")
        whole = grain.MapDataset.source(_WorkerRows(batches, ReplicaPlacement(1, 1, 0)))
        super().__init__(adapter_of(whole.slice(slice(0, 1)), None, None))
        local = grain.MapDataset.source(_WorkerRows(batches, placement))
        self._batches = adapter_of(local, None, None).get_tf_dataset()
        endless = is_endless(local)
        self.steps = None if endless else len(batches.batches)
        self.rows = None if endless else len(batches.rows)
        self.batch_size = batches.size
        self.own_rows = True
