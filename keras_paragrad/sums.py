"""Row sums, in the reduction order that is fastest with or without XLA."""

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Powers of two that measured best: a block's columns fill the processor's registers, and several blocks its cores.
_COLUMNS, _DEPTH = 64, 32
# Number of blocks from which using several cores pays off.
_MIN_BLOCKS = 64
# Tensors with at most this many columns are added elementwise before reducing over rows.
_MAX_SMALL_COLUMNS = 1024


def row_sums(values: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The sum of each row of a `(batch, ...)` tensor, `(batch,)`.

    On CPUs XLA reduces a row sequentially, but vectorizes over columns and runs blocks on several cores, so where it
    compiles this the row is reshaped into blocks that are first reduced over columns.
    """
    sizes: list[Any] = list(values.shape[1:])
    size = 0 if None in sizes else math.prod(sizes)
    if not by_xla or size < 2 * _COLUMNS:
        return tf.reduce_sum(values, axis=list(range(1, values.shape.rank)))
    rows = tf.reshape(values, [-1, size])
    block = _DEPTH * _COLUMNS
    # How many entries of a row are summed in blocks, and up to which entry the others are summed in columns.
    in_blocks = size // block * block if size >= _MIN_BLOCKS * block else 0
    in_columns = size // _COLUMNS * _COLUMNS
    parts = []
    if in_blocks:
        blocks = _prevent_fusion(
            tf.reduce_sum(tf.reshape(rows[:, :in_blocks], [-1, size // block, _DEPTH, _COLUMNS]), 2)
        )
        parts.append(tf.reduce_sum(_prevent_fusion(tf.reduce_sum(blocks, 1)), 1))
    if in_columns > in_blocks:
        columns = tf.reshape(rows[:, in_blocks:in_columns], [-1, (in_columns - in_blocks) // _COLUMNS, _COLUMNS])
        parts.append(tf.reduce_sum(_prevent_fusion(tf.reduce_sum(columns, 1)), 1))
    if size > in_columns:
        parts.append(tf.reduce_sum(rows[:, in_columns:], 1))
    return tf.add_n(parts)


def row_sums_of_all(tensors: Iterable[tf.Tensor], by_xla: bool = False) -> tf.Tensor:
    """The sum of each row over several `(batch, ...)` tensors, `(batch,)`, in float32.

    Tensors with the same small number of columns are added elementwise before one reduction, since each reduction is a
    separate pass over memory. Larger ones are reduced one at a time, to save memory.
    """
    small: dict[object, list[tf.Tensor]] = {}
    sums: list[tf.Tensor] = []
    for tensor in tensors:
        size = tensor.shape[1:].num_elements()
        if size is None or size > _MAX_SMALL_COLUMNS:
            sums.append(row_sums(tensor, by_xla))
        else:
            small.setdefault((size, tensor.dtype), []).append(tf.reshape(tensor, [-1, size]))
    sums += [tf.reduce_sum(tf.add_n(group), 1) for group in small.values()]
    return tf.add_n([tf.cast(tensor, "float32") for tensor in sums])


def _prevent_fusion(sums: tf.Tensor) -> tf.Tensor:
    # The maximum is a no-op that keeps XLA from fusing this sum with the next. Argument order matters: TensorFlow
    # 2.22's maximum returns its second argument where either is NaN.
    return tf.maximum(float("-inf"), sums)
