"""The per-example results of a training step: variables that the step writes and the host reads."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import compiled_by_xla
from keras_paragrad.compat.types import Scalar
from keras_paragrad.compat.workers import local_replica_values, replica_variable
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.rule import FactorLayout, Factors

Result = TypeVar("Result")

# A norm takes four bytes, so this capacity costs a step nothing.
_NORMS_CAPACITY = 2**14


class StepResults:
    """The per-example results of the last training step, in variables that it assigns.

    Args:
        names: Which of `"norms"`, `"gradients"` and `"second_moment"` to store.
        variables: The weights.
        capacity: Most examples on one replica, for steps compiled by XLA, which needs static shapes; `None` for any
            number.
    """

    def __init__(self, names: Collection[str], variables: Sequence[keras.Variable], capacity: int | None):
        self.variables = list(variables)
        self.capacity = capacity
        self.count = ReplicaSum([], tf.int64)
        # Gradients are scaled when they are read: scaling them in the step would take another pass over them.
        self.factor = ReplicaSum([])
        self.norms = ReplicaRows([], capacity, self.count) if "norms" in names else None
        shapes = [variable.shape for variable in self.variables] if "gradients" in names else []
        self.gradients = [FactoredGradients(shape, capacity, self.count, self.factor) for shape in shapes]
        self.second_moment = [ReplicaSum(v.shape) for v in variables] if "second_moment" in names else []

    def assign(self, quantities: Quantities, factor: tf.Tensor) -> tf.Tensor | None:
        """Stores a step's results and returns the norms, if these are stored; called within the step, on each replica.

        Args:
            quantities: The quantities of the step's backward pass.
            factor: Scales its gradients to gradients of each example's own loss.
        """
        self.count.assign(tf.cast(quantities.batch, "int64"))
        if self.gradients:
            self.factor.assign(factor)
            for stored, gradients in zip(self.gradients, quantities.gradients_to_keep(), strict=True):
                stored.assign(gradients)
        if self.second_moment:
            for stored, moment in zip(self.second_moment, quantities.second_moments(), strict=True):
                stored.assign(tf.cast(moment, "float32") * tf.square(factor))
        if self.norms is None:
            return None
        norms = tf.sqrt(quantities.squared_norms()) * factor
        self.norms.assign(norms)
        return norms


def default_capacity(names: Collection[str]) -> int | None:
    """The default capacity of a step that stores these results, or `None` where shapes may vary."""
    return _NORMS_CAPACITY if compiled_by_xla() and "gradients" not in names else None


def check_capacity(names: Collection[str], capacity: int | None) -> None:
    """Refuses steps that XLA compiles without a capacity for gradients."""
    if capacity is None and "gradients" in names and compiled_by_xla():
        raise ValueError(
            "This step is compiled by XLA, which needs to know the largest number of examples. Write "
            "PerExampleGradients(..., quantity='gradients', capacity=256), for batches of up to 256 on each device, or "
            "remove jit_compile=True."
        )


class ReplicaSum:
    """A tensor of the last step. Each replica stores a part, and the value is the sum of the parts."""

    def __init__(self, shape: Sequence[int], dtype: tf.DType = tf.float32):
        self.value = replica_variable(shape, dtype)

    def assign(self, value: Scalar) -> None:
        """Stores this replica's part."""
        self.value.assign(value)

    def of_replicas(self) -> list[np.ndarray]:
        """The parts of this process's replicas."""
        return [part.numpy() for part in local_replica_values(self.value)]

    def numpy(self) -> np.ndarray:
        """The sum over this process's replicas."""
        return np.sum(self.of_replicas(), axis=0)


class ReplicaRows:
    """A tensor with a row for each example of the last step; see `StepResults`.

    Args:
        shape: The shape of a row; `None` for axes of any size.
        capacity: Most rows that can be stored; `None` for any number.
        count: The number of rows that each replica has.
        factor: Multiplies each replica's rows when they are read.
        dtype: The dtype to store them in.
    """

    def __init__(
        self,
        shape: Sequence[int | None],
        capacity: int | None,
        count: ReplicaSum,
        factor: ReplicaSum | None = None,
        dtype: tf.DType = tf.float32,
    ):
        self.capacity, self.count, self.factor = capacity, count, factor
        self.values = replica_variable([capacity, *shape], dtype)

    def assign(self, rows: tf.Tensor) -> None:
        """Stores rows, `(count, *shape)`, padded with zeros to the capacity; called within a step, on each replica."""
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
        """The rows of each replica of this process; refuses more rows than the capacity."""
        counts = self.count.of_replicas()
        if self.capacity is not None and max(counts) > self.capacity:
            raise ValueError(
                f"A batch had {max(counts)} examples on one device, and the capacity of the compiled step is "
                f"{self.capacity}. Write PerExampleGradients(..., capacity={max(counts)})."
            )
        rows = [part.numpy()[:count] for part, count in zip(local_replica_values(self.values), counts, strict=True)]
        if self.factor is None:
            return rows
        return [part * factor for part, factor in zip(rows, self.factor.of_replicas(), strict=True)]

    def numpy(self) -> np.ndarray:
        """The rows of this process's replicas, concatenated."""
        return np.concatenate(self.of_replicas())


class _Buffers(NamedTuple):
    """The variables that store factors of the same shapes and layout."""

    shapes: Sequence[tuple[Any, ...]]
    layout: FactorLayout
    rows: Sequence[ReplicaRows]


class FactoredGradients:
    """The per-example gradients of one weight, stored as their factors where these are smaller.

    Args:
        shape: The weight's shape.
        capacity: Most examples that can be stored on each replica; `None` for any number.
        count: The number of examples that each replica has stored.
        factor: Multiplies the gradients when they are read.
    """

    def __init__(self, shape: Sequence[int], capacity: int | None, count: ReplicaSum, factor: ReplicaSum):
        self.shape, self.capacity, self.count, self.factor = shape, capacity, count, factor
        self.buffers: list[_Buffers] = []
        # The index of the buffers that the last step wrote to, on each replica.
        self.index = ReplicaSum([], tf.int64)

    def assign(self, gradients: "tf.Tensor | Factors") -> None:
        """Stores gradients, `(count, *shape)`, or their `Factors`; called within a step, on each replica."""
        factors = Factors.of(gradients)
        # Shapes in steps compiled by XLA are static, but may still be unknown while tracing.
        if self.capacity is not None and any(None in tensor.shape[1:] for tensor in factors.tensors):
            factors = Factors.of(factors.materialized())
        index = self._index_of(factors)
        self.index.assign(index)
        for rows, tensor in zip(self.buffers[index].rows, factors.tensors, strict=True):
            rows.assign(tensor)

    def numpy(self) -> np.ndarray:
        """The gradients, `(count, *shape)`, of this process's replicas; refuses more examples than the capacity."""
        if not self.buffers:
            return np.zeros((0, *self.shape), np.float32)
        indices = [int(index) for index in self.index.of_replicas()]
        rows = {index: [row.of_replicas() for row in self.buffers[index].rows] for index in set(indices)}
        gradients = [
            Factors([row[replica] for row in rows[index]], self.buffers[index].layout).materialized()
            for replica, index in enumerate(indices)
        ]
        return np.concatenate([np.asarray(gradient) for gradient in gradients])

    def _index_of(self, factors: Factors) -> int:
        """The index of the buffers for factors of these shapes; new ones are made if there are none."""
        # Each combination of shapes has its own buffers, unless shapes may vary.
        static = self.capacity is not None
        shapes = [
            (tensor.dtype, *(size if static else None for size in tensor.shape[1:])) for tensor in factors.tensors
        ]
        for index, buffers in enumerate(self.buffers):
            if (buffers.shapes, buffers.layout) == (shapes, factors.layout):
                return index
        self.buffers.append(_call_outside_of_graphs(self._make_buffers, shapes, factors.layout))
        return len(self.buffers) - 1

    def _make_buffers(self, shapes: Sequence[tuple[Any, ...]], layout: FactorLayout) -> _Buffers:
        """The variables that hold factors of these shapes."""
        # The gradients are linear in the last factor, so it alone is scaled.
        scales = [None] * (len(shapes) - 1) + [self.factor]
        rows = [
            ReplicaRows(shape, self.capacity, self.count, scale, tf.float32 if dtype.is_floating else dtype)
            for (dtype, *shape), scale in zip(shapes, scales, strict=True)
        ]
        return _Buffers(shapes, layout, rows)


def _call_outside_of_graphs(make: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `make` in another thread, since a `tf.function` may create variables only in its first trace."""
    strategy = tf.distribute.get_strategy()

    def call():
        with strategy.scope():
            return make(*arguments)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
