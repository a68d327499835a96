"""Where a training step leaves what it found out about its examples, and where the host picks it up."""

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.layers import compiled_by_xla
from keras_paragrad.per_example.quantities import Quantities

# A norm is four bytes, so this much room costs a step nothing.
ROOM_FOR_NORMS = 2**14


class StepResults:
    """What one training step after the other leaves behind.

    Args:
        kept: Which of `"norms"`, `"gradients"` and `"second_moment"`.
        variables: The weights.
        capacity: The most examples on one replica, for steps compiled by XLA, in which shapes are fixed; `None` takes
            any number.
    """

    def __init__(self, kept: Collection[str], variables: Sequence[keras.Variable], capacity: int | None):
        self.variables = list(variables)
        self.capacity = capacity
        self.count = Total([], tf.int32)
        # Gradients are multiplied when they are read. In the step, that would take a pass over them, or over cotangents
        # of which the backward pass may have the products already.
        self.factor = Total([])
        self.norms = Rows([], capacity, self.count) if "norms" in kept else None
        with_rows = self.variables if "gradients" in kept else []
        self.gradients = [Rows(v.shape, capacity, self.count, self.factor) for v in with_rows]
        self.second_moment = [Total(v.shape) for v in variables] if "second_moment" in kept else []

    def keep(self, quantities: Quantities, factor: tf.Tensor) -> tf.Tensor | None:
        """Leaves a step's results; within it, on each replica.

        Args:
            quantities: Those of the step's backward pass.
            factor: What makes its gradients those of each example's own loss.

        Returns:
            The norms, if they are kept.
        """
        self.count.assign(quantities.batch)
        if self.gradients:
            self.factor.assign(factor)
            for rows, gradients in zip(self.gradients, quantities.gradients(), strict=True):
                rows.assign(tf.cast(gradients, "float32"))
        if self.second_moment:
            for total, moment in zip(self.second_moment, quantities.second_moments(), strict=True):
                total.assign(tf.cast(moment, "float32") * tf.square(factor))
        if self.norms is None:
            return None
        norms = tf.sqrt(quantities.squared_norms()) * factor
        self.norms.assign(norms)
        return norms


class Rows:
    """A tensor with a row for each example of the last step, on every replica its own; see `StepResults`.

    Args:
        shape: That of a row.
        capacity: How many rows there is room for.
        count: How many there are on each replica.
        factor: What to multiply them by when they are read, on each replica.
    """

    def __init__(self, shape: Sequence[int], capacity: int | None, count: "Total", factor: "Total | None" = None):
        self.capacity, self.count, self.factor = capacity, count, factor
        self.values = _variable([capacity, *shape], tf.float32)

    def assign(self, rows: tf.Tensor) -> None:
        """Leaves rows, `(count, *shape)`; within a step, on each replica."""
        if self.capacity is not None:
            missing: Any = tf.maximum(self.capacity - tf.shape(rows)[0], 0)
            rows = tf.pad(rows, [[0, missing], *([0, 0] for _ in rows.shape[1:])])[: self.capacity]
        self.values.assign(tf.ensure_shape(rows, self.values.shape))

    def sum_of_squares(self) -> tf.Tensor:
        """The sum of all the squares of this replica; within a step."""
        # Beyond the rows there are zeros.
        return tf.reduce_sum(tf.square(self.values))

    def numpy(self) -> np.ndarray:
        """The rows of this process's replicas, one after the other.

        Raises:
            ValueError: There were more than the capacity.
        """
        counts = self.count.of_replicas()
        if self.capacity is not None and max(counts) > self.capacity:
            raise ValueError(
                f"A batch had {max(counts)} examples on one device, and in the compiled step there was room for "
                f"{self.capacity}. Write PerExampleGradients(..., capacity={max(counts)})."
            )
        factors = [1] * len(counts) if self.factor is None else self.factor.of_replicas()
        parts = zip(_local(self.values), counts, factors, strict=True)
        return np.concatenate([values.numpy()[:count] * factor for values, count, factor in parts])


class Total:
    """A tensor of the last step of which each replica has a part."""

    def __init__(self, shape: Sequence[int], dtype: tf.DType = tf.float32):
        self.value = _variable(shape, dtype)

    def assign(self, value: tf.Tensor) -> None:
        """Leaves a replica's part."""
        self.value.assign(value)

    def of_replicas(self) -> list[np.ndarray]:
        """The parts of this process's replicas."""
        return [part.numpy() for part in _local(self.value)]

    def numpy(self) -> np.ndarray:
        """The sum over this process's replicas."""
        return np.sum(self.of_replicas(), axis=0)


def capacity_for(kept: Collection[str]) -> int | None:
    """How many examples a step needs room for if nobody said, or `None` where shapes are not fixed.

    Args:
        kept: See `StepResults`.
    """
    return ROOM_FOR_NORMS if compiled_by_xla() and "gradients" not in kept else None


def _variable(shape: Sequence[int | None], dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        tf.zeros([size or 0 for size in shape], dtype),
        shape=tf.TensorShape(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _local(variable: Any) -> Sequence[Any]:
    """A variable's parts on this process's replicas."""
    return getattr(variable, "values", (variable,))
