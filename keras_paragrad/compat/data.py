"""Keras's readers of data, and what TensorFlow keeps private of its datasets."""

import itertools
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import (
    TensorflowSparseWrapper,
    convert_to_sliceable,
    slice_tensorflow_sparse_wrapper,
    train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from tensorflow.python.distribute.input_ops import auto_shard_dataset

from keras_paragrad.compat.check import check_objects


def split_for_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any]:
    """Arrays `(x, y, sample_weight)` to train on, and those of the last rows, `share` of all, to validate with."""
    return train_validation_split((x, y, sample_weight), validation_split=share)


class CustomAdapter(DataAdapter):
    """What Keras's trainer reads without an adapter of its own; see `DataAdapter` for what it asks of it."""

    @property
    def has_partial_batch(self) -> bool | None:
        """Unknown; a `DataAdapter` has to answer."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Unknown, as `has_partial_batch`."""
        return None


def adapter_of(x: Any, y: Any, sample_weight: Any, **options: Any) -> Any:
    """What Keras reads some data with: a `DataAdapter`, or an error if it can't."""
    check_objects()
    return get_data_adapter(x, y, sample_weight, **options)


class ArrayRows:
    """The arrays of an adapter, of which rows are taken by number, converted as `fit` converts them.

    Attributes:
        count: How many rows there are.
    """

    def __init__(self, adapter: Any):
        self.count: int = adapter._num_samples
        arrays = convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
        self._arrays = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays)).repeat()

    def batches(self, numbers: tf.data.Dataset) -> tf.data.Dataset:
        """A batch of rows for each vector of their numbers."""
        return self._mapped(numbers, _take_rows)

    def batches_with(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        """The elements `(numbers, other)`, with a batch of rows in place of their numbers."""
        return self._mapped(elements, _take_rows_with)

    def _mapped(self, elements: tf.data.Dataset, take: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.zip((elements, self._arrays)).map(take, num_parallel_calls=tf.data.AUTOTUNE)
        options = tf.data.Options()
        # As Keras does: an optimizer of the pipeline would write out the arrays with it.
        options.experimental_optimization.apply_default_optimizations = False
        return without_autotuning(dataset.with_options(options))


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without TensorFlow's autotuner.

    Its thread sleeps ever longer, and an iterator that ends at times waits for it: as long as the epoch took.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


# Converting it takes AutoGraph longer than tracing.
@tf.autograph.experimental.do_not_convert
def _take_rows(numbers: tf.Tensor, arrays: Any) -> Any:
    def take(leaf: Any) -> Any:
        if isinstance(leaf, TensorflowSparseWrapper):
            return slice_tensorflow_sparse_wrapper(leaf, numbers)
        if isinstance(leaf, (list, tuple, dict)):
            return None  # Go on inside.
        return tf.gather(leaf, numbers, axis=0) if tf.is_tensor(leaf) else leaf

    return keras.tree.traverse(take, arrays)


@tf.autograph.experimental.do_not_convert
def _take_rows_with(element: tuple[tf.Tensor, Any], arrays: Any) -> Any:
    numbers, other = element
    return _take_rows(numbers, arrays), other


def reread(adapter: Any) -> tuple[Any, dict[str, Any]] | None:
    """What Keras reads with an adapter, to be read in another way: `x` and options for `distributed_dataset`.

    `None` if it reads nothing that could be cut up: data that are distributed already.
    """
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


def reads_arrays(adapter: Any) -> bool:
    """Whether the data are arrays."""
    return isinstance(adapter, ArrayDataAdapter)


def first_batch(adapter: Any) -> Any:
    """The first batch, which is still there to be read."""
    if isinstance(adapter, GeneratorDataAdapter):
        return adapter._first_batches[0]
    if isinstance(adapter, PyDatasetAdapter):
        return adapter._standardize_batch(adapter.py_dataset[0])
    return next(iter(adapter.get_tf_dataset()))


def loses_prefetched_batches(adapter: Any) -> bool:
    """Whether what an iterator has read, or read ahead, may be missing from the next one: generators, `PyDataset`."""
    return isinstance(adapter, (GeneratorDataAdapter, PyDatasetAdapter))


def read_once(adapter: Any) -> None:
    """Makes every iterator resume where the last one stopped. Keras begins each of them with the first two batches."""
    if isinstance(adapter, GeneratorDataAdapter):
        stream = adapter.generator()
        adapter.generator = lambda: stream


def read_as_validation(adapter: Any, steps: int | None) -> None:
    """Makes every iterator read what it does in Keras's validation: the first two batches, then those not read yet.

    Args:
        adapter: An adapter that `read_once` was called with, and that nothing was read from.
        steps: How many batches a validation takes, if not all. No more are read, as an iterator's are lost at its end.
    """
    if isinstance(adapter, GeneratorDataAdapter):
        first, stream = adapter._first_batches, adapter.generator()
        for _ in first:
            next(stream)
        adapter.generator = lambda: itertools.islice(itertools.chain(first, stream), steps)


def random_seed() -> int | None:
    """The seed that `keras.utils.set_random_seed` was given, if it was called."""
    return get_global_attribute("global_random_seed")


def count_files(dataset: tf.data.Dataset) -> int | None:
    """How many files a dataset reads; `None` if it reads none, or names them only while it is read."""
    sources = dataset._inputs()
    if not sources:
        return _count_names(dataset)
    counts = [count for source in sources if (count := count_files(source)) is not None]
    return min(counts, default=None)


def _count_names(source: tf.data.Dataset) -> int | None:
    names = getattr(source, "_filenames", source)
    if isinstance(names, tf.Tensor):
        return int(tf.size(names))
    count = int(names.cardinality())
    return count if names.element_spec == tf.TensorSpec((), tf.string) and count >= 0 else None


def shard_files_of_worker(dataset: tf.data.Dataset, workers: int, worker: int) -> tf.data.Dataset:
    """What a dataset gives if it reads only every so many'th of its files.

    Raises:
        tf.errors.NotFoundError: It has no source that could be divided.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return auto_shard_dataset(dataset.with_options(options), workers, worker, workers)


def trust_equal_steps(distributed: Any) -> None:
    """Spares an iterator asking all replicas before every batch whether any of them still has one."""
    if hasattr(distributed, "_enable_get_next_as_optional"):
        distributed._enable_get_next_as_optional = False
