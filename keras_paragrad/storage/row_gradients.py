"""Gradients that may be those of single rows of a variable: scaled, and summed over the replicas."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.collectives import sum_over_replicas

_PASSES_ON = {"Identity", "Reshape", "Cast", "StopGradient", "Snapshot"}
_UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_SEGMENTS = {f"SparseSegment{how}GradV2" for how in ("Sum", "Mean", "SqrtN")}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}


def sum_gradients(gradients: Sequence[Any]) -> list[Any]:
    """Sums gradients over the replicas, dense or `tf.IndexedSlices`; other tensors as well.

    A product with a sparse matrix looks up each row once, so on one device its gradient has each row once. Where each
    replica has looked up the row, their gradients are added up, as an optimizer squares and clips what it is given.
    """
    parts: list[list[Any]] = [_parts(each) if isinstance(each, tf.IndexedSlices) else [each] for each in gradients]
    summed = iter(sum_over_replicas([part for found in parts for part in found]))
    return [_joined([_once(next(summed), part) for part in found]) for found in parts]


def scaled_gradient(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, dense or `tf.IndexedSlices` or `None`, times a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = scaled_gradient(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _once(total: Any, part: Any) -> Any:
    if not isinstance(part, tf.IndexedSlices) or not _has_unique_rows(part.indices):
        return total
    rows, places = tf.unique(total.indices)
    values = tf.math.unsorted_segment_sum(total.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, total.dense_shape)


def _parts(gradient: tf.IndexedSlices) -> list[Any]:
    """A gradient by the reads of the variable that it is put together from, where some of them read each row once."""
    reads = list(_reads(gradient.indices))
    if len(reads) == 1 or not any(map(_has_unique_rows, reads)):
        return [gradient]
    values = tf.split(gradient.values, [tf.size(rows) for rows in reads])
    return [tf.IndexedSlices(*part, gradient.dense_shape) for part in zip(values, reads, strict=True)]


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    values, rows = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, rows, parts[0].dense_shape)


def _reads(rows: tf.Tensor) -> Iterator[tf.Tensor]:
    """What the numbers of rows are put together from."""
    operation = None if tf.executing_eagerly() else rows.op
    if operation is not None and operation.type == "ConcatV2":
        for part in operation.inputs[:-1]:
            yield from _reads(part)
    else:
        yield rows


def _has_unique_rows(rows: tf.Tensor) -> bool:
    """Whether numbers of rows were made unique, as the graph shows."""
    while not tf.executing_eagerly():
        operation = rows.op
        if operation.type in _PASSES_ON:
            rows = operation.inputs[0]
        elif operation.type in _CALLS and (called := operation.graph._get_function(operation.get_attr("f").name)):
            rows = called.graph.outputs[rows.value_index]
        else:
            place = 1 if operation.type in _SEGMENTS else 0
            return operation.type in _UNIQUE | _SEGMENTS and rows.value_index == place
    return False
