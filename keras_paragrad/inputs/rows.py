"""Reads rows from arrays, datasets or generators, in chunks of equal size."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import shown


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
            iterator, each of them `x` or, as in `model.predict`, a tuple `(x, y, ...)` of which only `x` is used.

    Attributes:
        structure: The nesting of the inputs, with a number for each.
        known: The number of rows, or `None` if it is unknown before reading.
        first: The first nonempty batch; of arrays, all rows.

    Raises:
        ValueError: There are no rows, unequal numbers of rows, or sparse or ragged inputs.
    """

    def __init__(self, x: Any):
        batches, self.known = _batches(x)
        first = next(batches, None)
        if first is None:
            raise ValueError("`x` has no rows. Pass at least one; a generator can be read only once.")
        self.structure = keras.tree.pack_sequence_as(first, list(range(len(keras.tree.flatten(first)))))
        self._batches = (arrays for arrays in self._arrays(itertools.chain([first], batches)) if len(arrays[0]))
        filled = next(self._batches, None)
        if filled is None:
            raise ValueError("`x` has no rows. Pass at least one.")
        self.first = filled

    def chunks(self, batch_size: int, multiple: int = 1) -> Iterator[Chunk]:
        """All rows, in chunks.

        Args:
            batch_size: The most rows in a chunk.
            multiple: What the size of a chunk is a multiple of: the number of replicas.
        """
        size = None
        for part in _rebatched(itertools.chain([self.first], self._batches), -(-batch_size // multiple) * multiple):
            size = size or -(-len(part[0]) // multiple) * multiple
            yield _padded(part, size)

    def _arrays(self, batches: Iterator[Any]) -> Iterator[list[np.ndarray]]:
        shapes = None
        for batch in batches:
            keras.tree.assert_same_structure(batch, self.structure)
            arrays = arrays_of(batch)
            found = [array.shape[1:] for array in arrays]
            shapes = shapes or found
            if found != shapes:
                raise ValueError(f"A batch has rows of shape {found} after rows of {shapes}. Pad them to one shape.")
            yield arrays


def arrays_of(nested: Any) -> list[np.ndarray]:
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
            f"`x` is {shown(nested)}, which has no rows. Pass arrays of shape (rows, ...), nested as the model's "
            "inputs are, a tf.data.Dataset, or a generator of batches."
        )
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"The inputs have {[len(array) for array in arrays]} rows, and must have the same number.")
    return arrays


def is_batched(x: Any) -> bool:
    """Whether `x` yields batches, rather than being the rows themselves."""
    return isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")


def _batches(x: Any) -> tuple[Iterator[Any], int | None]:
    """The batches of `x`, and their number of rows if known."""
    if isinstance(x, keras.utils.PyDataset):
        count = itertools.count() if x.num_batches is None else range(x.num_batches)
        x = map(x.__getitem__, count)
    if is_batched(x):
        return (keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in x), None
    return iter([x]), len(arrays_of(x)[0])


def _rebatched(batches: Iterator[list[np.ndarray]], size: int) -> Iterator[list[np.ndarray]]:
    """Rebatches: all batches but the last have `size` rows. Rows of one array are not copied."""
    pieces, missing = [], size
    for batch in batches:
        start = 0
        while start < len(batch[0]):
            piece = [leaf[start : start + missing] for leaf in batch]
            pieces.append(piece)
            start += len(piece[0])
            missing -= len(piece[0])
            if not missing:
                yield _concatenated(pieces)
                pieces, missing = [], size
    if pieces:
        yield _concatenated(pieces)


def _concatenated(pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
    return pieces[0] if len(pieces) == 1 else [np.concatenate(leaves) for leaves in zip(*pieces, strict=True)]


def _padded(part: list[np.ndarray], size: int) -> Chunk:
    """A chunk of `size` rows, padded by repeating its own rows, which are valid inputs."""
    rows = len(part[0])
    if rows < size:
        part = [np.take(leaf, np.arange(size) % rows, axis=0) for leaf in part]
    return Chunk(part, rows)
