"""Where a training step leaves what it found out about its examples, and where the host picks it up."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class Rows:
    """One tensor of each step with a row for each example, on every replica its own.

    Args:
        shape: The shape of a row.
        capacity: The most rows on one replica, for steps compiled by XLA, in which shapes are fixed; `None` takes any
            number.
    """

    def __init__(self, shape: Sequence[int], capacity: int | None = None):
        self.capacity = capacity
        self.values = _variable(tf.zeros([capacity or 0, *shape]), [capacity, *shape])
        self.count = _variable(tf.zeros([], tf.int32), [])

    def assign(self, rows: tf.Tensor) -> None:
        """Leaves rows, `(count, *shape)`; within a step, on each replica."""
        self.count.assign(tf.shape(rows)[0])
        if self.capacity is not None:
            rest = tf.maximum(self.capacity - tf.shape(rows)[0], 0)
            padded = tf.pad(rows, [[0, rest], *([0, 0] for _ in rows.shape[1:])])[: self.capacity]
            rows = tf.ensure_shape(padded, self.values.shape)
        self.values.assign(rows)

    def numpy(self) -> np.ndarray:
        """The last step's rows of all local replicas, one after the other.

        Raises:
            ValueError: There were more than the capacity.
        """
        counts = [int(count) for count in _local(self.count)]
        if self.capacity is not None and max(counts) > self.capacity:
            raise ValueError(
                f"A batch had {max(counts)} examples on a replica, and there was room for {self.capacity}. Write "
                f"capacity={max(counts)} for the PerExampleGradients layer, or compile the model with "
                "jit_compile=False, which needs no capacity."
            )
        parts = [values.numpy()[:count] for values, count in zip(_local(self.values), counts, strict=True)]
        return np.concatenate(parts)


class Total:
    """One tensor of each step that is summed over the replicas.

    Args:
        shape: Its shape.
    """

    def __init__(self, shape: Sequence[int]):
        self.value = _variable(tf.zeros(shape), list(shape))

    def assign(self, value: tf.Tensor) -> None:
        """Leaves a replica's part."""
        self.value.assign(value)

    def numpy(self) -> np.ndarray:
        """The sum over the local replicas, of the last step."""
        return np.sum([part.numpy() for part in _local(self.value)], axis=0)


def _variable(initial: tf.Tensor, shape: Sequence[int | None]) -> tf.Variable:
    return tf.Variable(
        initial,
        shape=tf.TensorShape(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _local(variable: tf.Variable) -> Sequence[tf.Variable]:
    """A variable's parts on this process's replicas."""
    return getattr(variable, "values", (variable,))
