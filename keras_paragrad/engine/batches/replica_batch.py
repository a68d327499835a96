"""Replica batches: the replicas' rows of a batch. Some have none, if there are fewer examples than replicas."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor, Structure
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.engine.trials.trial import is_trial

Data = TypeVar("Data")


def rows_of(x: Structure) -> tf.Tensor:
    """The number of examples in a batch."""
    tensor = next(tensor for tensor in keras.tree.flatten(x) if tensor is not None)
    sizes: Any = tf.cast(tensor.dense_shape, "int32") if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor)
    return sizes[0]


def static_row_count(batch: Structure) -> int | None:
    """The static number of rows of a batch, or `None`."""
    return next(tensor for tensor in keras.tree.flatten(batch) if tensor is not None).shape[0]


# Marks the error that TensorFlow raises in a step, for `explain_different_rows`.
DIFFERENT_ROWS = "The tensors of a batch have different numbers of rows."


def cut_rows_of(data: Structure) -> tf.Tensor | int:
    """The number of rows of a batch to be cut: a Python integer, if static.

    Refuses tensors with different numbers of rows. If the numbers aren't static, the step raises TensorFlow's error,
    which `explain_different_rows` replaces.
    """
    tensors = [tensor for tensor in keras.tree.flatten(data) if tensor is not None]
    static = {tensor.shape[0] for tensor in tensors} - {None}
    if len(static) > 1:
        raise ValueError(no_examples(DIFFERENT_ROWS))
    if tensors[0].shape[0] is not None:
        return tensors[0].shape[0]
    first, *others = [rows_of(tensor) for tensor in tensors]
    # Row counts of ragged tensors are int64.
    checks = [tf.debugging.assert_equal(tf.cast(rows, first.dtype), first, DIFFERENT_ROWS) for rows in others]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first)


def explain_different_rows(error: tf.errors.InvalidArgumentError) -> None:
    """Raises a `ValueError` in place of TensorFlow's error for different numbers of rows. Ignores other errors."""
    if DIFFERENT_ROWS in error.message:
        raise ValueError(no_examples(DIFFERENT_ROWS)) from None


def no_examples(what: str) -> str:
    """The error for batches whose rows aren't examples, which begins with the symptom `what`."""
    return (
        f"{what} A batch is cut between its examples, and each example needs a row of every tensor: graphs whose nodes "
        "are put one after the other have none. Pad each graph to the same number of nodes and edges, accumulate over "
        "batches with AccumulatingOptimizer, or save memory with keras_paragrad.recompute(model)."
    )


def rows_at(data: Data, first: tf.Tensor | int, count: tf.Tensor | int, *, in_bounds: bool = False) -> Data:
    """Consecutive rows of every tensor in a batch. `in_bounds` says that all of them exist."""

    def part_of(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            others = tensor.dense_shape[1:]
            start = tf.concat([tf.cast([first], "int64"), tf.zeros_like(others)], 0)
            part = tf.sparse.slice(tensor, start, tf.concat([tf.cast([count], "int64"), others], 0))
            # Unbuilt layers need the static shape of a row.
            part.set_shape([None, *tensor.shape[1:]])
            return part
        static = isinstance(count, int) and count <= (tensor.shape[0] or 0)
        if isinstance(tensor, tf.Tensor) and (static or in_bounds):
            # Unlike `tf.gather`, a slice copies nothing if rows are aligned in memory.
            known: Any = tensor.shape[1:]
            sizes = tf.shape(tensor)[1:] if None in known else tf.constant(known.as_list(), tf.int32)
            return tf.slice(tensor, tf.concat([[first], tf.zeros_like(sizes)], 0), tf.concat([[count], sizes], 0))
        # XLA checks the bounds of `tf.slice` even in branches that never run.
        return tf.gather(tensor, first + tf.range(count))

    return keras.tree.map_structure(part_of, data)


def divide_batch(strategy: tf.distribute.Strategy, batch: Batch, parts: int | None = None) -> Batch:
    """Divides a batch among the replicas, in their order. `parts`: see `ReplicaPlacement`."""
    placement = replica_placement(strategy, parts)

    def divide(leaf: Any) -> tf.distribute.DistributedValues | None:
        if leaf is None:
            return None
        whole = leaf if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) else tf.convert_to_tensor(leaf)
        rows = int(rows_of(whole))

        def part(context: tf.distribute.experimental.ValueContext) -> Any:
            index = int(context.replica_id_in_sync_group)
            start, stop = (placement.first_row(rows, replica) for replica in (index, index + 1))
            return rows_at(whole, start, stop - start)

        return strategy.experimental_distribute_values_from_function(part)

    return keras.tree.map_structure(divide, batch)


class ReplicaBatch(NamedTuple):
    """A replica's number of rows in a batch, which may be 0."""

    rows: tf.Tensor
    # Whether there are rows; `None` if the static shapes show that there are.
    nonempty: tf.Tensor | None = None

    @classmethod
    def of(cls, data: Batch) -> "ReplicaBatch":
        """Makes the replica batch of a step's data."""
        tensors = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        rows = rows_of(tensors)
        never_empty = replica_count() == 1 or all(tensor.shape[0] for tensor in tensors)
        return cls(rows) if never_empty else cls(rows, rows > 0)

    def only(self, present: tf.Tensor) -> "ReplicaBatch":
        """Makes the replica batch of the rows that a mask `(rows,)` selects."""
        count = tf.math.count_nonzero(present, dtype=tf.int32)
        return ReplicaBatch(count, count > 0)

    def filled(self, data: Batch) -> Batch:
        """The data, or a padding row of zeros if there is no row. Not every layer accepts an empty batch."""
        return data if self.nonempty is None else tf.cond(self.nonempty, lambda: data, lambda: _zero_row(data))

    def drop_padding(self, outputs: Structure) -> Structure:
        """Outputs without the padding row's."""
        if self.nonempty is None:
            return outputs
        return keras.tree.map_structure(lambda tensor: tensor[: self.rows], outputs)

    def run(self, action: Callable[[], object]) -> None:
        """Calls a function unless the replica batch is empty."""
        if self.nonempty is None:
            action()
            return

        def run_it():
            action()
            return True

        tf.cond(self.nonempty, run_it, lambda: False)

    def weight(self, value: tf.Tensor) -> tf.Tensor:
        """A weight, or 0 if the replica batch is empty."""
        return value if self.nonempty is None else value * tf.cast(self.nonempty, value.dtype)

    def gradients(self, gradients: Gradients) -> Gradients:
        """Gradients, or zeros if the replica batch is empty. Those of the padding row may be NaN."""
        return list(gradients) if self.nonempty is None else [self._zero_if_empty(gradient) for gradient in gradients]

    def _zero_if_empty(self, gradient: GradientTensor | None) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._zero_if_empty(gradient.values), gradient.indices, gradient.dense_shape)
        # Unlike `tf.where`, a branch copies nothing.
        return tf.cond(self.nonempty, lambda: gradient, lambda: tf.zeros_like(gradient))


def _zero_row(data: Batch) -> Batch:
    def one(tensor: Any):
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            sizes = tf.concat([[1], tensor.dense_shape[1:]], 0)
            return tf.SparseTensor(tensor.indices[:0], tensor.values[:0], sizes)
        if isinstance(tensor, tf.RaggedTensor):
            return _zero_ragged_row(tensor)
        return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

    return keras.tree.map_structure(one, data)


def _zero_ragged_row(tensor: tf.RaggedTensor) -> tf.RaggedTensor:
    """Makes a row of zeros, of length 1 in each ragged dimension."""
    inner = tensor.flat_values.shape[1:]
    # Without rows, the values may lack their inner dimensions.
    sizes = inner if inner.is_fully_defined() else tf.shape(tensor.flat_values)[1:]
    one: Any = tf.zeros(tf.concat([[1], sizes], 0), tensor.dtype)
    ragged: Any = tf.RaggedTensor
    for splits in tensor.nested_row_splits:
        one = ragged.from_row_splits(one, tf.constant([0, 1], splits.dtype), validate=False)
    return one


class _Rows(NamedTuple):
    """What this thread's step knows of its rows: whether they are examples, and not padding. `None` means yes."""

    nonempty: tf.Tensor | bool | None


def counting_examples(nonempty: tf.Tensor | bool | None) -> contextlib.AbstractContextManager[object]:
    """Context in which a replica's step is traced, on examples if `nonempty` is true or `None`, else on padding."""
    return _PATCH.open(_Rows(nonempty))


def _moments(
    rows: _Rows,
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces `BatchNormalization._moments`, which is `original`: the mean and variance of a batch, `(channels,)`."""
    averages_rows = 0 in _reduction_axes(layer, inputs)
    # A trial has no other replicas.
    if not (layer.synchronized and averages_rows) or replica_count() == 1 or is_trial():
        return original(layer, inputs, mask)
    if mask is not None:
        return _masked_moments(layer, inputs, mask, rows.nonempty)
    if rows.nonempty is not None:
        # Batch statistics leave the padding row out.
        inputs = inputs[: tf.where(rows.nonempty, tf.shape(inputs)[0], 0)]
    return original(layer, inputs, None)


def _reduction_axes(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> list[int]:
    """The axes to average over: all but the channels."""
    axes = list(range(len(inputs.shape)))
    del axes[layer.axis]
    return axes


def _masked_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor, nonempty: tf.Tensor | bool | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keras's moments of masked inputs, with sums over all replicas."""
    context, axes = tf.distribute.get_replica_context(), _reduction_axes(layer, inputs)
    counted = tf.broadcast_to(tf.expand_dims(tf.cast(mask, "bool"), -1), tf.shape(inputs))
    if nonempty is not None:
        counted = tf.logical_and(counted, nonempty)

    def total(values: tf.Tensor) -> tf.Tensor:
        local = tf.reduce_sum(tf.where(counted, values, tf.zeros_like(values)), axes, keepdims=True)
        # This all-reduce has a gradient, unlike this package's collectives.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, local)

    count = total(tf.ones_like(inputs)) + keras.backend.epsilon()
    mean = total(inputs) / count
    variance = total(tf.square(inputs - mean)) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


_PATCH = ProcessPatch[_Rows](lambda: [Replacement(keras.layers.BatchNormalization, "_moments", _moments)])
