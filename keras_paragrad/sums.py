"""Sums along rows, in the order in which the compiler at hand is fast."""

import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Powers of two that measured best: a block's columns fill the processor's registers, and several blocks its cores.
_COLUMNS, _DEPTH = 64, 32
# So many blocks, before it pays to wake other cores.
_WORTH_IT = 64
# Columns of tensors that are worth keeping until they are added up with others.
_FEW = 1024


def row_sums(values: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The sum of each row of a `(batch, ...)` tensor, `(batch,)`.

    Args:
        values: The tensor.
        by_xla: Whether XLA compiles this. On CPUs it adds up a row one number after the other, but columns beside each
            other and blocks on several cores, so that a row is cut into blocks whose columns are added first.

    Example:

    >>> import tensorflow as tf
    >>> from keras_paragrad.sums import row_sums
    >>> row_sums(tf.ones([2, 3000]), by_xla=True).numpy()
    array([3000., 3000.], dtype=float32)
    """
    sizes: list[Any] = list(values.shape[1:])
    size = 0 if None in sizes else math.prod(sizes)
    if not by_xla or size < 2 * _COLUMNS:
        return tf.reduce_sum(values, axis=list(range(1, values.shape.rank)))
    rows = tf.reshape(values, [-1, size])
    block = _DEPTH * _COLUMNS
    in_blocks = size // block * block if size >= _WORTH_IT * block else 0
    in_columns = size // _COLUMNS * _COLUMNS
    parts = []
    if in_blocks:
        blocks = _apart(tf.reduce_sum(tf.reshape(rows[:, :in_blocks], [-1, size // block, _DEPTH, _COLUMNS]), 2))
        parts.append(tf.reduce_sum(_apart(tf.reduce_sum(blocks, 1)), 1))
    if in_columns > in_blocks:
        columns = tf.reshape(rows[:, in_blocks:in_columns], [-1, (in_columns - in_blocks) // _COLUMNS, _COLUMNS])
        parts.append(tf.reduce_sum(_apart(tf.reduce_sum(columns, 1)), 1))
    if size > in_columns:
        parts.append(tf.reduce_sum(rows[:, in_columns:], 1))
    return tf.add_n(parts)


def row_sums_of_all(tensors: Iterable[tf.Tensor], by_xla: bool = False) -> tf.Tensor:
    """The sum of each row over several `(batch, ...)` tensors, `(batch,)`, in float32.

    Args:
        tensors: The tensors. Those of equally many, few columns are added up before their rows are, as every sum over
            rows takes a pass of its own. Of others as many would have to be kept in memory.
        by_xla: As in `row_sums`.

    Example:

    >>> import tensorflow as tf
    >>> from keras_paragrad.sums import row_sums_of_all
    >>> row_sums_of_all([tf.ones([2, 3]), tf.ones([2, 3, 1]), tf.ones([2])]).numpy()
    array([7., 7.], dtype=float32)
    """
    few: dict[Any, list[tf.Tensor]] = {}
    sums: list[tf.Tensor] = []
    for tensor in tensors:
        size = tensor.shape[1:].num_elements()
        if size is None or size > _FEW:
            sums.append(row_sums(tensor, by_xla))
        else:
            few.setdefault((size, tensor.dtype), []).append(tf.reshape(tensor, [-1, size]))
    sums += [tf.reduce_sum(tf.add_n(alike), 1) for alike in few.values()]
    return tf.add_n([tf.cast(each, "float32") for each in sums])


def _apart(sums: tf.Tensor) -> tf.Tensor:
    # The maximum changes nothing, but keeps XLA from making one sum of this and the next.
    return tf.maximum(sums, float("-inf"))
