"""One pass over the training data for the mean and variance of `keras.layers.Normalization` layers.

Each worker reads its shard of every batch, or all of its own data, and one all-reduce merges the results. This works
for every shard policy, and gives bitwise the same numbers on all workers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import is_grain, shard_files_of_worker
from keras_paragrad.compat.types import FitData, Structure
from keras_paragrad.compat.workers import ReplicaPlacement, all_or_none, gather, replica_placement
from keras_paragrad.distribution.data.batch_sharding import choose_policy
from keras_paragrad.distribution.data.sources import is_endless

CHUNK_BYTES = 32 * 2**20


class Moments(NamedTuple):
    """Running statistics of some values.

    Attributes:
        size: Number of values per mean.
        mean: Their means.
        deviations: The sums of their squared deviations from the mean.
    """

    size: float
    mean: np.ndarray
    deviations: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "Moments":
        """The moments of no values."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, values: np.ndarray, axes: tuple[int, ...]) -> "Moments":
        """The moments of an array over some of its axes, including the first; computed in chunks to save memory."""
        shape = tuple(size for axis, size in enumerate(values.shape) if axis not in axes)
        total = cls.empty(shape)
        rows = max(1, CHUNK_BYTES // max(1, values[:1].size * 8))
        for start in range(0, len(values), rows):
            chunk = values[start : start + rows].astype(np.float64)
            with np.errstate(invalid="ignore"):  # Infinity and NaN show in the mean.
                mean = chunk.mean(axis=axes, keepdims=True)
                deviations = np.square(chunk - mean).sum(axis=axes)
                total = total.merged(cls(chunk.size / max(1, mean.size), mean.reshape(shape), deviations))
        return total

    def merged(self, other: "Moments") -> "Moments":
        """The moments of the values of both."""
        size = self.size + other.size
        if not size:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.size / size)
        between = np.square(distance) * (self.size * other.size / size)
        return Moments(size, mean, self.deviations + other.deviations + between)

    def to_vector(self) -> np.ndarray:
        """The moments as one float64 vector."""
        return np.concatenate([[self.size], self.mean.ravel(), self.deviations.ravel()])

    @classmethod
    def from_vector(cls, vector: np.ndarray, shape: tuple[int, ...]) -> "Moments":
        """The inverse of `to_vector`."""
        mean, deviations = np.split(vector[1:], 2)
        return cls(float(vector[0]), mean.reshape(shape), deviations.reshape(shape))


# Selects the values that a layer normalizes from an `x` of the data.
Select = Callable[[Structure], Structure]
NO_ROWS = "The data has no rows to compute a mean of. Pass the training data."


def adapt_all(
    layers: list[tuple[keras.layers.Normalization, Select]],
    data: FitData,
    strategy: tf.distribute.Strategy,
    policy: str,
) -> None:
    """Sets the mean and variance of several layers in one pass; each comes with its `Select`."""
    placement = replica_placement(strategy)
    moments = all_or_none(strategy, lambda: _worker_moments(layers, data, policy, placement))
    vectors = gather(strategy, np.concatenate([moment.to_vector() for moment in moments]))
    start = 0
    for (layer, _), shard in zip(layers, moments, strict=True):
        size = shard.to_vector().size
        total = Moments.empty(shard.mean.shape)
        for vector in vectors[:, start : start + size]:
            total = total.merged(Moments.from_vector(vector, shard.mean.shape))
        start += size
        _assign(layer, total)


def _worker_moments(
    layers: list[tuple[keras.layers.Normalization, Select]], data: Any, policy: str, placement: ReplicaPlacement
) -> list[Moments]:
    """The moments of this worker's shard of the data, for each layer; fails if the worker has no batch."""
    _check_data(data)
    totals: list[Moments | None] = [None] * len(layers)
    policy = choose_policy(policy, data, placement.workers)
    if policy == "file":
        data = shard_files_of_worker(data, placement.workers, placement.worker)
    # Under other policies, all that this worker reads is its shard.
    sharding = placement if policy == "data" else ReplicaPlacement(1, 1, 0)
    for x in _batches(data):
        for index, (layer, select) in enumerate(layers):
            values = _values(select(x))
            axes = _reduced_axes(layer, values)
            before = totals[index]
            if before is None:
                before = Moments.empty(tuple(np.delete(values.shape, axes)))
            rows = np.array_split(values, sharding.workers)[sharding.worker]
            totals[index] = before.merged(Moments.of(rows, axes))
    moments = [total for total in totals if total is not None]
    if len(moments) < len(layers):
        raise ValueError(NO_ROWS)
    return moments


def _check_data(data: FitData) -> None:
    """Refuses data that can be read only once, or never ends."""
    if hasattr(data, "__next__"):
        raise ValueError(
            f"A {type(data).__name__} can be read only once, so nothing would be left to train on. Use "
            "tf.data.Dataset.from_generator, or a keras.utils.PyDataset."
        )
    if is_endless(data):
        raise ValueError("The data is infinite, and so has no mean. Pass it without .repeat().")


def _batches(data: Any) -> Iterator[Structure]:
    """The inputs of each batch; arrays are a single batch."""
    if isinstance(data, tf.data.Dataset) or is_grain(data):
        yield from (keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in data)
    elif isinstance(data, keras.utils.PyDataset):
        for index in range(data.num_batches):
            yield keras.utils.unpack_x_y_sample_weight(data[index])[0]
    else:
        yield data


def only_input(x: Structure) -> Structure:
    """The `Select` of data with one input; an error if there are several."""
    leaves = keras.tree.flatten(x)
    if len(leaves) != 1:
        raise ValueError(
            f"The data has {len(leaves)} inputs. Select the one that the layer normalizes, as in select=lambda x: x[0]."
        )
    return leaves[0]


def _values(leaf: Any) -> np.ndarray:
    """A leaf's values as an array."""
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
        raise ValueError(f"A {type(leaf).__name__} can't be normalized. Convert it to a dense tensor first.")
    values = np.asarray(leaf)
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise ValueError(f"The data is of dtype {values.dtype}, which has no mean. Normalize numbers only.")
    return values


def _reduced_axes(layer: keras.layers.Normalization, values: np.ndarray) -> tuple[int, ...]:
    """The axes that the layer averages over; builds the layer if necessary, and refuses values that it can't take."""
    if layer.input_mean is not None:
        raise ValueError(f"The layer {layer.name!r} was created with a mean already. Leave mean= and variance= out.")
    feature_axes = {axis % max(1, values.ndim) for axis in layer.axis}
    if 0 in feature_axes:
        raise ValueError(
            f"The layer {layer.name!r} keeps axis 0, the batch axis, and so has a mean for each row. Give it the axes "
            "of a row: axis=-1 for inputs of shape (rows, features), or axis=None for a single mean."
        )
    if not layer.built:
        layer.build((None, *values.shape[1:]))
    expected = tuple(layer.get_build_config()["input_shape"])
    fits = len(expected) == values.ndim and all(
        size in (None, actual) for size, actual in zip(expected[1:], values.shape[1:], strict=True)
    )
    if not fits:
        raise ValueError(f"The layer {layer.name!r} takes inputs of shape {expected}; the data has {values.shape}.")
    return tuple(axis for axis in range(values.ndim) if axis not in feature_axes)


def _assign(layer: keras.layers.Normalization, moments: Moments) -> None:
    """Sets a layer's mean and variance."""
    if not moments.size:
        raise ValueError(NO_ROWS)
    if not np.isfinite(moments.mean).all():
        raise ValueError(
            f"The input of the layer {layer.name!r} contains NaN or infinite values, and so has no mean. Remove their "
            "rows, or replace the values."
        )
    layer.adapt_mean.assign(moments.mean.astype(np.float32))
    layer.adapt_variance.assign((moments.deviations / moments.size).astype(np.float32))
    layer.finalize_state()
