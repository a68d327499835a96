"""Where global batches come from: arrays, or a stream that is already batched."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.data import ArrayRows, first_batch, read_once
from keras_paragrad.distribution.data.order import ReorderedDataset, order_of
from keras_paragrad.engine.replicas.prepared import use_enqueuer_per_iterator


class Source:
    """Global batches, epoch after epoch.

    Args:
        adapter: Keras's adapter of the data.

    Attributes:
        steps: Number of batches per epoch; `None` if it is infinite, or unknown until the data is read.
        rows: Number of rows, if known.
        batch_size: Number of rows per batch, if known.
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
        """The first batch, without consuming it."""
        return first_batch(self.adapter)

    def reorder(self, epoch: int) -> None:
        """Call before an iterator is made; one iterator may serve several epochs of `fit`."""

    def begin(self) -> None:
        """Call before an epoch is read."""
        self.adapter.on_epoch_begin()

    def end(self) -> None:
        """Call after an epoch was read."""
        self.adapter.on_epoch_end()


class ArraySource(Source):
    """Batches of the rows of arrays.

    Args:
        adapter: Keras's adapter of the arrays, which has their batch size.
        shuffle: As in `fit`.
        seed: The shuffling seed.
        size: Number of rows per batch.
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
        order = tf.constant(order_of(rows, size, self._shuffle, self._seed, epoch)) if self._shuffle else None

        # Converting it takes AutoGraph longer than tracing.
        @tf.autograph.experimental.do_not_convert
        def numbers(step: tf.Tensor) -> tf.Tensor:
            start, stop = step * size, tf.minimum((step + 1) * size, rows)
            found = tf.range(start, stop) if order is None else order[start:stop]
            # If all batches have one size, shapes are static, so steps need no branch for empty shards.
            return tf.ensure_shape(found, [known])

        return self._arrays.batches(steps.map(numbers))

    def first_batch(self) -> Any:
        numbers = tf.data.Dataset.from_tensors(tf.range(min(self._arrays.count, self._size)))
        return next(iter(self._arrays.batches(numbers)))


class StreamSource(Source):
    """Batches of data that is already batched: a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator.

    Args:
        adapter: Keras's adapter of the data.
        size: The number of rows to rebatch to, if any.
        reordered: The dataset that is shuffled before each epoch, if any.
    """

    def __init__(self, adapter: Any, size: int | None = None, reordered: ReorderedDataset | None = None):
        super().__init__(adapter)
        self._reordered = reordered
        read_once(adapter)
        use_enqueuer_per_iterator(adapter)
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
    """The static number of rows per batch of a dataset, if it has one."""
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batches.element_spec)]
    return next((shape[0] for shape in shapes if isinstance(shape, tf.TensorShape) and shape.rank), None)


def is_batched(x: Any) -> bool:
    """Whether data comes in batches already: a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator."""
    return isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")


def is_endless(x: Any) -> bool:
    """Whether data is infinite."""
    if isinstance(x, tf.data.Dataset):
        return int(x.cardinality()) == tf.data.INFINITE_CARDINALITY
    return isinstance(x, keras.utils.PyDataset) and x.num_batches is None


def _cardinality(dataset: tf.data.Dataset) -> int | None:
    count = int(dataset.cardinality())
    return count if count >= 0 else None
