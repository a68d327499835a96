"""Reads rows from arrays, datasets or generators, in chunks of equal size, and collects results."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import quote
from keras_paragrad.compat.data import is_batched
from keras_paragrad.compat.types import Structure


class Chunk(NamedTuple):
    """Rows that pass through the model together.

    Attributes:
        leaves: An array for each input, all with the same number of rows.
        rows: How many of them are real; the rest is padding.
    """

    leaves: list[np.ndarray]
    rows: int


class InputRows:
    """Reads nested inputs and yields them in chunks of equal size.

    Args:
        x: Arrays, nested or not; or batches of any size from a `tf.data.Dataset`, a `keras.utils.PyDataset` or an
            iterator, each of them `x` or, as in `model.predict`, a tuple `(x, y, ...)`: only `x` is used.

    Attributes:
        structure: The nesting of the inputs, with a number for each.
        count: The number of rows, or `None` if it is unknown before reading.
        first: The first nonempty batch; of arrays, all rows.
    """

    def __init__(self, x: Any):
        self.count: int | None = None
        self.structure: Any = None
        if isinstance(x, keras.utils.PyDataset):
            x = map(x.__getitem__, itertools.count() if x.num_batches is None else range(x.num_batches))
        if is_batched(x):
            batches = (keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in x)
        else:
            batches, self.count = iter([x]), len(to_arrays(x)[0])
        self._batches = self._checked_arrays(batches)
        first = next(self._batches, None)
        if first is None:
            raise ValueError("`x` has no rows. Pass at least one; a generator can be read only once.")
        self.first = first

    def chunks(self, batch_size: int, multiple: int = 1) -> Iterator[Chunk]:
        """Yields all rows in padded chunks of one size: at most `batch_size`, rounded up to a `multiple`."""
        size = None
        for batch in _rebatch(itertools.chain([self.first], self._batches), -(-batch_size // multiple) * multiple):
            rows = len(batch[0])
            size = size or -(-rows // multiple) * multiple
            # Its own rows, repeated, are valid inputs.
            yield Chunk(
                [np.take(leaf, np.arange(size) % rows, axis=0) for leaf in batch] if rows < size else batch, rows
            )

    def _checked_arrays(self, batches: Iterator[Structure]) -> Iterator[list[np.ndarray]]:
        """Yields each batch with rows as a list of arrays; rejects one whose nesting or row shape isn't the first's."""
        expected = None
        for batch in batches:
            if self.structure is None:
                self.structure = keras.tree.pack_sequence_as(batch, list(range(len(keras.tree.flatten(batch)))))
            keras.tree.assert_same_structure(batch, self.structure)
            arrays = to_arrays(batch)
            shapes = [array.shape[1:] for array in arrays]
            expected = expected or shapes
            if shapes != expected:
                raise ValueError(f"A batch has rows of shape {shapes} after rows of {expected}. Pad them to one shape.")
            if len(arrays[0]):
                yield arrays


def to_arrays(nested: object) -> list[np.ndarray]:
    """The arrays in a nested structure, which must have the same number of rows."""
    leaves = keras.tree.flatten(nested)
    for leaf in leaves:
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(f"`x` has a {type(leaf).__name__}. Convert it with .to_tensor() or tf.sparse.to_dense().")
    try:
        arrays = [np.asarray(leaf) for leaf in leaves]
    except Exception:  # whatever a user's object raises
        arrays = []
    if not arrays or any(array.ndim == 0 or array.dtype == object for array in arrays):
        raise ValueError(
            f"`x` is {quote(nested)}, which has no rows. Pass arrays of shape (rows, ...), nested as the model's "
            "inputs are, a tf.data.Dataset, or a generator of batches."
        )
    if len({len(array) for array in arrays}) > 1:
        counts = [len(array) for array in arrays]
        raise ValueError(
            f"The inputs, and the labels in `output` or the vectors beside them, have {counts} rows, and must have the "
            "same number."
        )
    return arrays


def _rebatch(batches: Iterator[list[np.ndarray]], size: int) -> Iterator[list[np.ndarray]]:
    """Rebatches: all batches but the last have `size` rows. A batch that is part of one array is not copied."""
    pieces, missing = [], size
    for batch in batches:
        start = 0
        while start < len(batch[0]):
            piece = [leaf[start : start + missing] for leaf in batch]
            pieces.append(piece)
            start += len(piece[0])
            missing -= len(piece[0])
            if not missing:
                yield _concatenate(pieces)
                pieces, missing = [], size
    if pieces:
        yield _concatenate(pieces)


def _concatenate(pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
    return pieces[0] if len(pieces) == 1 else [np.concatenate(leaves) for leaves in zip(*pieces, strict=True)]


def collected(results: Iterator[list[np.ndarray]], rows: int | None) -> list[np.ndarray]:
    """The results of all chunks as arrays; with the number of rows, without a second copy of all of them."""
    if rows is None:
        return [np.concatenate(parts) for parts in zip(*results, strict=True)]
    arrays, row = list[np.ndarray](), 0
    for values in results:
        arrays = arrays or [np.empty((rows, *value.shape[1:]), value.dtype) for value in values]
        for array, value in zip(arrays, values, strict=True):
            array[row : row + len(value)] = value
        row += len(values[0])
    return arrays
