"""The gradient of a batch, put together from those of its slices."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import unscaled
from keras_paragrad.engine.losses.sums import zero_sums
from keras_paragrad.engine.replicas.shard import rows_of
from keras_paragrad.engine.step.forward import StepContext
from keras_paragrad.engine.step.gradient import Gradient, gradient_of
from keras_paragrad.storage.row_gradients import scale_gradient


class RunningSums(NamedTuple):
    """Running sums over the slices of a batch.

    Attributes:
        gradients: For each trainable weight the weighted sum, or `None` if there is none yet.
        divisor: The sum of the weights.
        losses: What the losses that are shown are made of.
    """

    gradients: list[Any]
    divisor: tf.Tensor
    losses: tf.Tensor


class SliceSums:
    """Sums the gradients of slices, and records while tracing which variables get one.

    Args:
        context: What the pass of a slice needs; it weights the gradient.
        alike: Whether all slices weigh the same, so that no gradient is multiplied with its weight.
    """

    def __init__(self, context: StepContext, *, alike: bool = False):
        self.context, self.model = context, context.model
        self.alike = alike
        self.variables = self.model.trainable_weights
        self.present: set[int] = set()
        # The mean over a slice has larger gradients than that over the batch, and would overflow where that doesn't.
        self._scaled = unscaled(self.model.optimizer) is not self.model.optimizer
        self.last: Any = None

    def empty(self) -> RunningSums:
        """The sums over no slice, for slices that are added one after another while tracing."""
        return self._begun([None] * len(self.variables))

    def zero(self) -> RunningSums:
        """The same as tensors, as a loop needs them."""
        return self._begun([_zeros(variable) for variable in self.variables])

    def _begun(self, gradients: list[Any]) -> RunningSums:
        return RunningSums(gradients, tf.constant(0.0), zero_sums(self.model))

    def add(self, total: RunningSums, data: Any, rows: Any, **how: Any) -> RunningSums:
        """The sums with one more slice.

        Args:
            total: Those without it.
            data: The slice.
            rows: How many examples the batch has.
            **how: What the `StepContext` of this slice has of its own.
        """
        share = tf.constant(1.0)
        if self._scaled:
            share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")
            how["weigh_replica"] = lambda weight: tf.constant(1.0) if weight.summed else share
        part = self.last = gradient_of(self.context, data, **how)
        assert part.weight is not None, "the split stage weights every slice"
        assert part.sums is not None, "losses of slices are not left to Keras"
        value = tf.constant(1.0) if self.alike else part.weight.value
        counts = value if part.weight.summed or not self._scaled else value / share
        gradients = list(total.gradients)
        for index, gradient in enumerate(part.gradients):
            if gradient is not None:
                self.present.add(index)
                gradients[index] = self._added(index, gradients[index], gradient, counts)
        return RunningSums(gradients, total.divisor + value, total.losses + part.sums.vector)

    def joined(self, total: RunningSums, other: RunningSums) -> RunningSums:
        """The sums over the slices of both."""
        gradients = list(total.gradients)
        for index, gradient in enumerate(other.gradients):
            if gradient is not None:
                gradients[index] = self._added(index, gradients[index], gradient, tf.constant(1.0))
        return RunningSums(gradients, total.divisor + other.divisor, total.losses + other.losses)

    def _added(self, index: int, total: Any, gradient: Any, value: tf.Tensor) -> Any:
        variable = self.variables[index]
        dtype = _dtype(variable)
        if getattr(variable, "overwrite_with_gradient", False):
            found = tf.cast(gradient, dtype)
            return found if total is None else tf.maximum(total, found)
        value = tf.cast(value, dtype)
        if isinstance(gradient, tf.IndexedSlices):
            rows = value * tf.cast(gradient.values, dtype)
            if total is None or isinstance(total, tf.IndexedSlices):
                # Not summed: Keras's optimizers square and clip the gradient of each lookup by itself.
                before = ([total.values], [total.indices]) if total else ([], [])
                return tf.IndexedSlices(
                    tf.concat([*before[0], rows], 0), tf.concat([*before[1], gradient.indices], 0), gradient.dense_shape
                )
            return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], rows)
        found = tf.cast(gradient, dtype)
        found = found if self.alike else value * found
        return found if total is None else total + found

    def gradient(self, total: RunningSums, rows: Any) -> Gradient:
        """The gradient of the batch.

        Args:
            total: The sums over all its slices.
            rows: How many examples it has.
        """
        divisor = tf.constant(1.0) if self.last.weight.summed else total.divisor
        factor = tf.math.reciprocal_no_nan(divisor)

        def mean(index: int, variable: keras.Variable):
            if index not in self.present:
                return None
            gradient = total.gradients[index]
            if not getattr(variable, "overwrite_with_gradient", False):
                gradient = scale_gradient(gradient, factor)
            return tf.cast(gradient, variable.dtype)

        gradients = [mean(index, variable) for index, variable in enumerate(self.variables)]
        return self.last.of_all(gradients, tf.convert_to_tensor(rows), divisor, total.losses)


def rows_at(data: Any, first: Any, count: Any, *, inside: bool = False) -> Any:
    """So many consecutive rows of every tensor in a batch, from the `first` on.

    Args:
        data: The batch.
        first: The first row.
        count: How many.
        inside: Whether no batch ends before the last of them.
    """

    def part_of(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            others = tensor.dense_shape[1:]
            start = tf.concat([tf.cast([first], "int64"), tf.zeros_like(others)], 0)
            part = tf.sparse.slice(tensor, start, tf.concat([tf.cast([count], "int64"), others], 0))
            # Layers that are not built yet need the static shape of a row.
            part.set_shape([None, *tensor.shape[1:]])
            return part
        static = isinstance(count, int) and count <= (tensor.shape[0] or 0)
        if isinstance(tensor, tf.Tensor) and (static or inside):
            # Copies nothing where rows are aligned in memory.
            known: Any = tensor.shape[1:]
            sizes = tf.shape(tensor)[1:] if None in known else tf.constant(known.as_list(), tf.int32)
            return tf.slice(tensor, tf.concat([[first], tf.zeros_like(sizes)], 0), tf.concat([[count], sizes], 0))
        # XLA checks the bounds of tf.slice against a smaller batch even if the branch never runs.
        return tf.gather(tensor, first + tf.range(count))

    return keras.tree.map_structure(part_of, data)


def _dtype(variable: keras.Variable) -> str:
    return "float64" if variable.dtype == "float64" else "float32"


def _zeros(variable: keras.Variable) -> tf.Tensor:
    return tf.zeros(variable.shape, _dtype(variable))
