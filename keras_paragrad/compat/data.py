"""Keras's data adapters, and private functions of TensorFlow's datasets."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.layers import get_global_attribute
from keras_paragrad.compat.model import overrides_train_step
from keras_paragrad.compat.private import (
    ArrayDataAdapter,
    DataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    TensorflowSparseWrapper,
    convert_to_sliceable,
    get_data_adapter,
    slice_tensorflow_sparse_wrapper,
    train_validation_split,
)
from keras_paragrad.compat.types import Batch, Dataset, FitData, Specs, Structure

# The adapter with which Keras reads the data of `fit`.
Adapter: TypeAlias = DataAdapter


class EpochIterator(Protocol):
    """Keras's iterator over the steps of an epoch, each with how many are done and the iterator over batches."""

    data_adapter: DataAdapter
    steps_per_epoch: int | None

    def __iter__(self) -> Iterator[tuple[int, int, Iterator[Batch]]]:
        """Iterates over an epoch."""
        ...


def split_for_validation(x: FitData, y: FitData, sample_weight: FitData, share: float) -> tuple[Any, Any]:
    """Splits arrays `(x, y, sample_weight)` into training rows and the last `share` of the rows, for validation."""
    return train_validation_split((x, y, sample_weight), validation_split=share)


class CustomAdapter(DataAdapter):
    """Base of data that `fit` takes as `x`, and that Keras's trainer uses as its own adapter."""

    @property
    def has_partial_batch(self) -> bool | None:
        """Unknown; a `DataAdapter` has to answer."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Unknown, as `has_partial_batch`."""
        return None


def adapter_of(x: FitData, y: FitData, sample_weight: FitData, **options: Any) -> DataAdapter:
    """The `DataAdapter` that Keras reads the data with."""
    check_internals("data")
    return get_data_adapter(x, y, sample_weight, **options)


class ArrayRows:
    """The arrays of an adapter, converted as in `fit`, and indexed by row.

    Attributes:
        count: Number of rows.
    """

    def __init__(self, adapter: DataAdapter):
        # An optional input may be missing.
        self.count = next(int(leaf.shape[0]) for leaf in keras.tree.flatten(adapter._inputs) if leaf is not None)
        arrays = convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
        self._arrays = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays)).repeat()

    def batches(self, indices: Dataset) -> Dataset:
        """A batch of rows for each vector of indices."""
        return self._mapped(indices, _take_rows)

    def batches_with(self, elements: Dataset) -> Dataset:
        """Maps elements `(indices, other)` to `(rows, other)`."""
        return self._mapped(elements, _take_rows_with)

    def _mapped(self, elements: Dataset, take: Callable[..., Structure]) -> Dataset:
        """Maps elements by `take(element, arrays)`."""
        dataset = tf.data.Dataset.zip((elements, self._arrays)).map(take, num_parallel_calls=tf.data.AUTOTUNE)
        options = tf.data.Options()
        # As Keras does: the pipeline optimizer would serialize the arrays.
        options.experimental_optimization.apply_default_optimizations = False
        return without_autotuning(dataset.with_options(options))


def without_autotuning(dataset: Dataset) -> Dataset:
    """The dataset without TensorFlow's autotuner.

    The autotuner's thread sleeps for increasingly long intervals, so destroying an iterator can block for as long
    as the epoch took.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


# AutoGraph takes longer to convert this than tracing takes.
@tf.autograph.experimental.do_not_convert
def _take_rows(indices: tf.Tensor, arrays: Structure) -> Structure:
    """Gathers rows by index from nested arrays and sparse tensors."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, TensorflowSparseWrapper):
            return slice_tensorflow_sparse_wrapper(leaf, indices)
        if isinstance(leaf, (list, tuple, dict)):
            return None  # Descend.
        return tf.gather(leaf, indices, axis=0) if tf.is_tensor(leaf) else leaf

    return keras.tree.traverse(take, arrays)


@tf.autograph.experimental.do_not_convert
def _take_rows_with(element: tuple[tf.Tensor, Structure], arrays: Structure) -> tuple[Structure, Structure]:
    indices, other = element
    return _take_rows(indices, arrays), other


def source_with_options(adapter: DataAdapter) -> tuple[Any, dict[str, Any]] | None:
    """An adapter's data, and options of `distributed_dataset` to read them alike; `None` if they are distributed."""
    if isinstance(adapter, CustomAdapter):
        return None
    if isinstance(adapter, ArrayDataAdapter):
        return adapter, {"shuffle": adapter._shuffle}
    if isinstance(adapter, PyDatasetAdapter):
        return adapter.py_dataset, {"shuffle": adapter.shuffle, "class_weight": adapter.class_weight}
    if isinstance(adapter, GeneratorDataAdapter):
        return adapter, {}
    dataset = adapter.get_tf_dataset()
    return None if isinstance(dataset, tf.distribute.DistributedDataset) else (dataset, {})


def is_grain(x: object) -> bool:
    """Whether data is one of Grain's datasets or its loader."""
    kinds = (getattr(sys.modules.get("grain"), name, ()) for name in ("MapDataset", "IterDataset", "DataLoader"))
    return isinstance(x, tuple(kinds))


def is_batched(x: object) -> bool:
    """Whether data is a dataset of batches (of TensorFlow, Keras or Grain) or a generator, rather than arrays."""
    return isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__") or is_grain(x)


def check_is_batched(model: keras.Model | None, spec: Specs) -> None:
    """Refuses data whose elements, of this spec, are single examples, as far as scalars and the model's inputs tell."""
    for leaf in tf.nest.flatten(spec):
        if isinstance(shape := getattr(leaf, "shape", None), tf.TensorShape) and shape.rank == 0:
            raise ValueError(
                f"The data has an element {leaf}, which is a scalar and not a batch. Batch the dataset first: "
                "dataset.batch(64)."
            )
    if model is None or overrides_train_step(model):
        return
    leaves = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(spec)[0])
    for leaf, given in zip(leaves, getattr(model, "inputs", None) or (), strict=False):
        shape, batch = getattr(leaf, "shape", None), tf.TensorShape(given.shape)
        # Keras adds a last axis of one.
        # Of unknown rank, data may be anything.
        single = isinstance(shape, tf.TensorShape) and shape.rank == batch.rank - 1 and batch[-1] != 1
        if single and batch[1:].is_compatible_with(shape):
            raise ValueError(
                f"The data has elements of shape {shape}, and {model.name!r} takes batches of shape {batch}. Batch "
                "them first: dataset.batch(64)."
            )


def reads_arrays(adapter: DataAdapter) -> bool:
    """Whether the data are arrays."""
    return isinstance(adapter, ArrayDataAdapter)


def first_batch(adapter: DataAdapter) -> Batch:
    """The first batch, without consuming it."""
    if isinstance(adapter, GeneratorDataAdapter):
        return adapter._first_batches[0]
    if isinstance(adapter, PyDatasetAdapter):
        return adapter._standardize_batch(adapter.py_dataset[0])
    return next(iter(adapter.get_tf_dataset()))


def _batch_size_of(dataset: Dataset) -> int | None:
    """The number of rows in a batch of a dataset, by the last of its transformations that batches; or `None`."""
    size = getattr(dataset, "_batch_size", getattr(dataset, "_batch_sizes", None))
    if size is not None:
        return int(np.max(size))
    sizes = {_batch_size_of(source) for source in dataset._inputs()}
    return sizes.pop() if len(sizes) == 1 else None


def rows_of_batches(adapter: DataAdapter) -> int | None:
    """The number of rows in a batch; if nothing says it, in the first one, which iterators still yield."""
    batch = None
    if loses_prefetched_batches(adapter):
        batch = first_batch(adapter)
    elif size := _batch_size_of(dataset := adapter.get_tf_dataset()):
        return size
    else:
        # What can't be read can't be trained on either, which says so.
        with contextlib.suppress(tf.errors.OpError):
            batch = next(iter(dataset), None)
    return next((leaf.shape[0] for leaf in keras.tree.flatten(batch) if leaf is not None), None)


def loses_prefetched_batches(adapter: DataAdapter) -> bool:
    """Whether batches that an iterator prefetched are lost to the next one, as with generators and `PyDataset`."""
    return isinstance(adapter, (GeneratorDataAdapter, PyDatasetAdapter))


def read_once(adapter: DataAdapter) -> None:
    """Makes a generator's iterators resume where the last one stopped; Keras's start with its first two batches."""
    if isinstance(adapter, GeneratorDataAdapter):
        stream = adapter.generator()
        adapter.generator = lambda: stream


def read_as_validation(adapter: DataAdapter, steps: int | None) -> None:
    """Makes every iterator over a generator read as Keras's validation does: its first two batches, then unread ones.

    `adapter` is unread, and `read_once` was called with it. No more than `steps` batches are read, if it isn't `None`:
    an iterator that ends loses them.
    """
    if isinstance(adapter, GeneratorDataAdapter):
        first, stream = adapter._first_batches, adapter.generator()
        for _ in first:
            next(stream)
        adapter.generator = lambda: itertools.islice(itertools.chain(first, stream), steps)


def random_seed() -> int | None:
    """The seed of `keras.utils.set_random_seed`, or `None` if it was not called."""
    return get_global_attribute("global_random_seed")


def trust_equal_steps(distributed: tf.distribute.DistributedDataset) -> None:
    """Lets an iterator skip asking all replicas before each batch whether one of them has data left."""
    if hasattr(distributed, "_enable_get_next_as_optional"):
        distributed._enable_get_next_as_optional = False


def without_optionals(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step that gets `None` for empty optionals, as Keras's does; older releases pass batches as they are."""
    convert = getattr(model, "_autoconvert_optionals", None)
    return step if convert is None else convert(step)
