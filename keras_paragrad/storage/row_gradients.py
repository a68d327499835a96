"""Gradients that may be `tf.IndexedSlices`: scaled, added, and summed over the replicas."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import sum_over_replicas
from keras_paragrad.compat.operations import SAME_BUFFER
from keras_paragrad.compat.types import GradientTensor, Scalar

# Operations that leave row numbers as they are.
_SAME_NUMBERS = SAME_BUFFER | {"Cast"}
# Operations whose first output, and gradients whose second output, is a vector of unique row numbers.
_UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_SEGMENTS = {f"SparseSegment{reduction}GradV2" for reduction in ("Sum", "Mean", "SqrtN")}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}


def sum_gradients(gradients: Sequence[GradientTensor]) -> list[GradientTensor]:
    """Sums gradients over the replicas, dense or `tf.IndexedSlices`; other tensors as well.

    A product with a sparse matrix looks up each row once, so on one device its gradient has each row once. Where
    several replicas have looked up a row, their gradients are added, because optimizers square and clip row by row.
    """
    reads = [_split_reads(gradient) for gradient in gradients]
    sums = iter(sum_over_replicas([read for group in reads for read in group]))
    return [_concatenate([_merge_rows(next(sums), read) for read in group]) for group in reads]


def scale_gradient(gradient: GradientTensor | None, factor: Scalar) -> Any:
    """A gradient, dense or `tf.IndexedSlices` or `None`, times a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = scale_gradient(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def is_overwritten(variable: Any) -> bool:
    """Whether the "gradient" is the variable's new value, as for float8 scales: it is neither summed nor scaled."""
    return getattr(variable, "overwrite_with_gradient", False)


def scale_gradients(
    gradients: Sequence[GradientTensor | None], variables: Sequence[Any], factor: Scalar
) -> list[GradientTensor | None]:
    """Multiplies gradients by a scalar; leaves the new values of float8 scales as they are."""
    pairs = zip(gradients, variables, strict=True)
    return [gradient if is_overwritten(variable) else scale_gradient(gradient, factor) for gradient, variable in pairs]


def add_gradients(one: Any, other: Any) -> Any:
    """The sum of two gradients, each dense or `tf.IndexedSlices` or `None`."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        # Rows are not summed: Keras's optimizers square and clip the gradient of each lookup.
        rows = tf.concat([one.values, other.values], 0)
        return tf.IndexedSlices(rows, tf.concat([one.indices, other.indices], 0), other.dense_shape)
    if isinstance(other, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(one, other.indices[:, tf.newaxis], other.values)
    return tf.convert_to_tensor(one) + other


def sum_dtype(variable: keras.Variable) -> str:
    """The dtype in which the gradients of a variable are summed."""
    return "float64" if variable.dtype == "float64" else "float32"


def accumulate_gradient(
    variable: keras.Variable, total: GradientTensor | None, gradient: Any, factor: Scalar | None = None
) -> Any:
    """Returns `total + factor * gradient`; for float8 scales, the larger of the two."""
    gradient = tf.cast(gradient, sum_dtype(variable))
    if is_overwritten(variable):
        return gradient if total is None else tf.maximum(total, gradient)  # pyright: ignore
    return add_gradients(total, gradient if factor is None else scale_gradient(gradient, factor))


def _merge_rows(total: Any, read: GradientTensor) -> Any:
    """Merges duplicate rows of the sum over replicas of a gradient, `read`, if it has unique rows itself."""
    if not isinstance(read, tf.IndexedSlices) or not _has_unique_rows(read.indices):
        return total
    rows, positions = tf.unique(total.indices)
    values = tf.math.unsorted_segment_sum(total.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, total.dense_shape)


def _split_reads(gradient: GradientTensor) -> Sequence[GradientTensor]:
    """Splits the gradient of a variable that is read several times by reads, if one of these has unique rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return [gradient]
    reads = list(indices_by_read(gradient.indices))
    if len(reads) == 1 or not any(map(_has_unique_rows, reads)):
        return [gradient]
    values = tf.split(gradient.values, [tf.size(rows) for rows in reads])
    return [tf.IndexedSlices(*pair, gradient.dense_shape) for pair in zip(values, reads, strict=True)]


def _concatenate(reads: list[Any]) -> Any:
    if len(reads) == 1:
        return reads[0]
    values, rows = (tf.concat([getattr(read, name) for read in reads], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, rows, reads[0].dense_shape)


def indices_by_read(rows: tf.Tensor) -> Iterator[tf.Tensor]:
    """The row numbers that were concatenated into `rows`."""
    operation = None if tf.executing_eagerly() else rows.op
    if operation is not None and operation.type == "ConcatV2":
        for input_ in operation.inputs[:-1]:
            yield from indices_by_read(input_)
    else:
        yield rows


def _has_unique_rows(rows: tf.Tensor) -> bool:
    """Whether the graph shows that row numbers are unique."""
    while not tf.executing_eagerly():
        operation = rows.op
        if operation.type in _SAME_NUMBERS:
            rows = operation.inputs[rows.value_index]
        elif operation.type in _CALLS and (called := operation.graph._get_function(operation.get_attr("f").name)):
            rows = called.graph.outputs[rows.value_index]
        else:
            output = 1 if operation.type in _SEGMENTS else 0
            return operation.type in _UNIQUE | _SEGMENTS and rows.value_index == output
    return False
