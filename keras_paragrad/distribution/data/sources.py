"""Where global batches come from: arrays, or a stream that is batched already."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.data import ArrayRows, first_batch, read_once
from keras_paragrad._keras.replicas.parallel_reading import read_by_own_workers
from keras_paragrad.distribution.data.order import ReorderedDataset, order_of


class Source:
    """Global batches, epoch after epoch.

    Args:
        adapter: What Keras reads the data with.

    Attributes:
        steps: How many batches an epoch has; `None` if only reading tells, or it never ends.
        rows: How many rows it has, if that is known.
        batch_size: How many rows a batch has, if that is known.
        changes: Whether each epoch needs its own dataset.
    """

    def __init__(self, adapter: Any):
        self.adapter = adapter
        self.steps: int | None = adapter.num_batches
        self.rows: int | None = None
        self.batch_size: int | None = None
        self.changes = False

    def batches(self, epoch: int) -> tf.data.Dataset:
        """The batches of an epoch."""
        raise NotImplementedError

    def first_batch(self) -> Any:
        """The first batch, which is still there to be read."""
        return first_batch(self.adapter)

    def reorder(self, epoch: int) -> None:
        """To be called before an iterator is made; one may be read in several epochs of `fit`."""

    def begin(self) -> None:
        """To be called before an epoch is read."""
        self.adapter.on_epoch_begin()

    def end(self) -> None:
        """To be called when an epoch has been read."""
        self.adapter.on_epoch_end()


class ArraySource(Source):
    """Batches of the rows of arrays.

    Args:
        adapter: What Keras reads the arrays with; it knows their batch size.
        shuffle: As in `fit`.
        seed: What the orders of the epochs are drawn from.
        size: How many rows make a batch.
    """

    def __init__(self, adapter: Any, shuffle: bool | str, seed: int, size: int):
        super().__init__(adapter)
        self._arrays = ArrayRows(adapter)
        self._shuffle = shuffle
        self._seed = seed
        self._size = size
        self.rows = self._arrays.count
        self.batch_size = size
        self.steps = -(-self._arrays.count // size)
        self.changes = bool(shuffle)

    def batches(self, epoch: int) -> tf.data.Dataset:
        rows, size = self._arrays.count, self._size
        known = None if rows % size else size
        steps = tf.data.Dataset.range(-(-rows // size))
        if self._shuffle:
            order = tf.constant(order_of(rows, size, self._shuffle, self._seed, epoch))
            numbers = steps.map(lambda step: order[step * size : (step + 1) * size])
        else:
            numbers = steps.map(lambda step: tf.range(step * size, tf.minimum((step + 1) * size, rows)))
        # Where all batches are of one size, shapes say so, and steps have no part that might be without rows.
        numbers = numbers.map(lambda found: tf.ensure_shape(found, [known]))
        return self._arrays.batches(numbers)

    def first_batch(self) -> Any:
        numbers = tf.data.Dataset.from_tensors(tf.range(min(self._arrays.count, self._size)))
        return next(iter(self._arrays.batches(numbers)))


class StreamSource(Source):
    """Batches that come as batches: from a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.

    Args:
        adapter: What Keras reads them with.
        size: The rows that the batches are put together to, if they are to be batched anew.
        reordered: The dataset whose order is drawn anew for each epoch, if there is one.
    """

    def __init__(self, adapter: Any, size: int | None = None, reordered: ReorderedDataset | None = None):
        super().__init__(adapter)
        self._reordered = reordered
        read_once(adapter)
        read_by_own_workers(adapter)
        self._batches = adapter.get_tf_dataset()
        if size:
            self._batches = self._batches.rebatch(size)
            self.steps = None if self.steps is None else _cardinality(self._batches)
        self.batch_size = size or static_rows(self._batches)

    def batches(self, epoch: int) -> tf.data.Dataset:
        return self._batches

    def reorder(self, epoch: int) -> None:
        if self._reordered:
            self._reordered.reorder(epoch)


def static_rows(batches: tf.data.Dataset) -> int | None:
    """The rows that all batches of a dataset have, if it knows."""
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batches.element_spec)]
    return next((shape[0] for shape in shapes if isinstance(shape, tf.TensorShape) and shape.rank), None)


def is_endless(x: Any) -> bool:
    """Whether data never ends by itself."""
    if isinstance(x, tf.data.Dataset):
        return int(x.cardinality()) == tf.data.INFINITE_CARDINALITY
    return isinstance(x, keras.utils.PyDataset) and x.num_batches is None


def _cardinality(dataset: tf.data.Dataset) -> int | None:
    count = int(dataset.cardinality())
    return count if count >= 0 else None
