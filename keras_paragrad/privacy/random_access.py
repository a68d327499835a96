"""Data with random access: Poisson sampling reads any example by its index."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import ArrayRows, adapter_of, reads_arrays
from keras_paragrad.compat.types import Batch, Dataset, FitData
from keras_paragrad.plain_text import counted

# The examples that `digest_of_examples` reads at a time.
_CHUNK = 1024


class Examples(Protocol):
    """Examples by index, from 0 to `count` - 1."""

    count: int

    def gather(self, draws: Dataset) -> Dataset:
        """Replaces the indices in elements `(indices, present)` by the batch of these examples; keeps `present`."""
        ...


def examples_of(
    x: FitData, y: FitData = None, sample_weight: FitData = None, class_weight: dict[int, float] | None = None
) -> Examples:
    """The examples in the data that `fit` gets; refuses data that can only be read in sequence, or of unknown size."""
    if isinstance(x, keras.utils.PyDataset | tf.data.Dataset):
        if any(given is not None for given in (y, sample_weight, class_weight)):
            raise ValueError(
                f"{type(x).__name__} has the targets and sample weights in its batches, and y, sample_weight or "
                "class_weight is passed as well. Leave them out, and let batches be (x, y, sample_weight)."
            )
        if isinstance(x, tf.data.Dataset):
            return _from_dataset(x)
        batches: Any = x
        return _Batches(len(batches), lambda index: tuple(batches[index]), type(x).__name__)
    if isinstance(x, Iterator) or callable(x):
        raise ValueError(
            "A generator yields examples in its own order, and each update needs a random sample of them all. "
            "Pass arrays, a keras.utils.PyDataset, or a tf.data.Dataset.from_tensor_slices(...).batch(...)."
        )
    adapter = adapter_of(x, y, sample_weight, class_weight=class_weight)
    if not reads_arrays(adapter):
        raise ValueError(
            f"Examples of {type(x).__name__} can't be read in random order. Pass arrays, a keras.utils.PyDataset, or a "
            "tf.data.Dataset.from_tensor_slices(...).batch(...)."
        )
    return _Arrays(adapter)


class _Arrays:
    """Examples in arrays, gathered by TensorFlow."""

    def __init__(self, adapter: Any):
        self._rows = ArrayRows(adapter)
        self.count = self._rows.count

    def gather(self, draws: Dataset) -> Dataset:
        return self._rows.batches_with(draws)


class _Batches:
    """Examples in `batches` batches, which `read` returns by index; all but the last have the size of the first."""

    def __init__(self, batches: int, read: Callable[[int], Batch], name: str):
        if batches < 1:
            raise ValueError(f"{name} is empty.")
        self._read, self._name, self._batches = read, name, batches
        first = self._batch(0)
        self.size = _rows_in(first, name)
        self._last = _rows_in(self._batch(batches - 1), name)
        self.count = (batches - 1) * self.size + self._last
        self._spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), first)

    def _batch(self, index: int) -> Batch:
        return keras.tree.map_structure(
            lambda leaf: leaf if leaf is None else keras.ops.convert_to_numpy(leaf), self._read(index)
        )

    def take(self, indices: np.ndarray) -> Batch:
        """The batch of the examples with these indices."""
        # Each batch is read once, and what is taken from it concatenated; `positions` are the examples' places there.
        positions = np.empty(len(indices), np.int64)
        parts, start = [], 0
        for index in np.unique(indices // self.size):
            batch = self._batch(int(index))
            expected = self._last if index == self._batches - 1 else self.size
            if (rows := _rows_in(batch, self._name)) != expected:
                raise ValueError(
                    f"Batch {index} of {self._name} has {counted(rows, 'example')}, and batches before the last must "
                    f"have {self.size}, as the first one has: examples are drawn by their numbers."
                )
            (in_batch,) = np.nonzero(indices // self.size == index)
            offsets = indices[in_batch] % self.size
            parts.append(keras.tree.map_structure(lambda leaf, offsets=offsets: leaf[offsets], batch))
            positions[in_batch] = np.arange(start, start + len(in_batch))
            start += len(in_batch)
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves)[positions], *parts)

    def gather(self, draws: Dataset) -> Dataset:
        specs = keras.tree.flatten(self._spec)

        def take(indices: tf.Tensor, present: tf.Tensor) -> Batch:
            leaves = tf.numpy_function(
                lambda indices: tuple(keras.tree.flatten(self.take(indices))),
                [indices],
                [spec.dtype for spec in specs],
            )
            for leaf, spec in zip(leaves, specs, strict=True):
                leaf.set_shape([indices.shape[0], *spec.shape[1:]])
            return keras.tree.pack_sequence_as(self._spec, list(leaves)), present

        return draws.map(tf.autograph.experimental.do_not_convert(take))


def _from_dataset(dataset: Dataset) -> _Batches:
    """The batches of a `tf.data.Dataset`, read by their indices."""
    batches = int(dataset.cardinality())
    if batches < 0:
        raise ValueError(
            "This tf.data.Dataset is of unknown or infinite size, and the probability of an example to be drawn "
            "depends on how many there are. Pass arrays, or tf.data.Dataset.from_tensor_slices(...).batch(...)."
        )

    def read(index: int) -> Batch:
        try:
            batch = tf.data.experimental.at(dataset, index)
        except (
            tf.errors.UnimplementedError,
            tf.errors.FailedPreconditionError,
            tf.errors.InvalidArgumentError,
        ) as error:
            raise ValueError(
                "This tf.data.Dataset can't be read in random order, so no example can be drawn. Leave out what "
                "filters examples or reads them from files or generators, or pass arrays. TensorFlow says: "
                + error.message[:200]
            ) from error
        return batch if isinstance(batch, tuple) else (batch,)

    return _Batches(batches, read, "the tf.data.Dataset")


def _rows_in(batch: Batch, name: str) -> int:
    """The number of examples in a batch."""
    shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(batch) if leaf is not None]
    sizes = {shape[0] if shape else -1 for shape in shapes}
    if len(sizes) != 1 or -1 in sizes:
        raise ValueError(
            f"The elements of {name} have the shapes {', '.join(map(str, shapes))}, which don't belong to a batch: "
            "the first axis has to be the same number of examples in each. Batch the data first, as in "
            "dataset.batch(64)."
        )
    return int(sizes.pop())


def digest_of_examples(examples: Examples) -> bytes:
    """A digest of all examples, to recognize the data. Only a keyed hash of it may be saved."""
    indices = np.arange(examples.count)
    draws = tf.data.Dataset.from_tensor_slices((indices, np.ones(len(indices), bool))).batch(_CHUNK)
    digest = hashlib.blake2b(digest_size=16)
    for batch, _ in examples.gather(draws):
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            if leaf is not None:
                value = keras.ops.convert_to_numpy(leaf)
                digest.update(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    return digest.digest()
