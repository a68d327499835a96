"""Per-replica variables that a step writes and the host reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import local_parts, replica_variable


class ReplicaRows:
    """A tensor with a row for each example of the last step; see `StepResults`.

    Args:
        shape: The shape of a row; `None` for axes of any size.
        capacity: Most rows that can be stored; `None` for any number.
        count: How many rows each replica has.
        factor: Multiplies each replica's rows when they are read.
        dtype: The dtype to store them in.
    """

    def __init__(
        self,
        shape: Sequence[int | None],
        capacity: int | None,
        count: "Total",
        factor: "Total | None" = None,
        dtype: tf.DType = tf.float32,
    ):
        self.capacity, self.count, self.factor = capacity, count, factor
        self.values = replica_variable([capacity, *shape], dtype)

    def assign(self, rows: tf.Tensor) -> None:
        """Stores rows, `(count, *shape)`; called within a step, on each replica."""
        rows = tf.cast(rows, self.values.dtype)
        if self.capacity is not None:
            missing: Any = tf.maximum(self.capacity - tf.shape(rows)[0], 0)
            rows = tf.pad(rows, [[0, missing], *([0, 0] for _ in rows.shape[1:])])[: self.capacity]
        self.values.assign(tf.ensure_shape(rows, self.values.shape))

    def sum_of_squares(self) -> tf.Tensor:
        """The sum of squares of this replica's rows; called within a step."""
        # The padding is zeros.
        return tf.reduce_sum(tf.square(self.values))

    def of_replicas(self) -> list[np.ndarray]:
        """The rows of each replica of this process.

        Raises:
            ValueError: There were more than the capacity.
        """
        counts = self.count.of_replicas()
        if self.capacity is not None and max(counts) > self.capacity:
            raise ValueError(
                f"A batch had {max(counts)} examples on one device, and the capacity of the compiled step is "
                f"{self.capacity}. Write PerExampleGradients(..., capacity={max(counts)})."
            )
        rows = [part.numpy()[:count] for part, count in zip(local_parts(self.values), counts, strict=True)]
        if self.factor is None:
            return rows
        return [part * factor for part, factor in zip(rows, self.factor.of_replicas(), strict=True)]

    def numpy(self) -> np.ndarray:
        """The rows of this process's replicas, concatenated.

        Raises:
            ValueError: There were more than the capacity.
        """
        return np.concatenate(self.of_replicas())


class Total:
    """A tensor of the last step whose value is the sum of the replicas' parts."""

    def __init__(self, shape: Sequence[int], dtype: tf.DType = tf.float32):
        self.value = replica_variable(shape, dtype)

    def assign(self, value: Any) -> None:
        """Stores this replica's part."""
        self.value.assign(value)

    def of_replicas(self) -> list[np.ndarray]:
        """The parts of this process's replicas."""
        return [part.numpy() for part in local_parts(self.value)]

    def numpy(self) -> np.ndarray:
        """The sum over this process's replicas."""
        return np.sum(self.of_replicas(), axis=0)
