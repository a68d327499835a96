"""Combines the gradients of slices into the gradient of the batch."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.optimizer import say_rows_are_summed, unwrap_loss_scale
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor, Scalar
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.sums import LossSums, zero_sums
from keras_paragrad.engine.replicas.replica_batch import rows_of
from keras_paragrad.engine.step.gradient import Gradient, StepContext, equal_share, gradient_of
from keras_paragrad.storage.row_gradients import accumulate_gradient, is_overwritten, scale_gradient, sum_dtype


class RunningSums(NamedTuple):
    """Running sums over the slices of a batch.

    Attributes:
        gradients: The weighted sum for each trainable weight, or `None` if there is none yet.
        divisor: The sum of the weights.
        losses: The sum of the `LossSums`' vectors.
    """

    gradients: Gradients
    divisor: tf.Tensor
    losses: tf.Tensor


class SliceSums:
    """Sums the gradients of slices, and records while tracing which variables get one.

    Args:
        context: The context of a slice's pass, which weights the gradient.
        equal_weights: Whether all slices have the same weight, so that no gradient is multiplied with its own.
    """

    def __init__(self, context: StepContext, *, equal_weights: bool = False):
        self.context, self.model = context, context.model
        self.equal_weights = equal_weights
        self.variables = self.model.trainable_weights
        self.present: set[int] = set()
        # The gradient of a slice's mean is larger than the gradient of the batch's mean, and could overflow.
        self._scales_loss = unwrap_loss_scale(self.model.optimizer) is not self.model.optimizer
        self.last: Any = None

    def empty(self) -> RunningSums:
        """The sums to start from, for slices that are added one after another while tracing."""
        return self._running_sums([None] * len(self.variables))

    def zero(self) -> RunningSums:
        """The sums to start from as tensors, for a loop."""
        return self._running_sums([tf.zeros(variable.shape, sum_dtype(variable)) for variable in self.variables])

    def _running_sums(self, gradients: Gradients) -> RunningSums:
        return RunningSums(gradients, tf.constant(0.0), zero_sums(self.model))

    def add(self, total: RunningSums, data: Batch, rows: tf.Tensor | int, **fields: Any) -> RunningSums:
        """Adds a slice to the sums.

        Args:
            total: The sums.
            data: The slice.
            rows: The number of examples in the batch.
            **fields: Fields of the `StepContext` to replace for this slice.
        """
        share = tf.constant(1.0)
        if self._scales_loss:
            share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")
            fields["weigh_replica"] = lambda weight: equal_share(weight) * (1.0 if weight.summed else share)
        part = self.last = gradient_of(self.context, data, **fields)
        assert part.weight is not None, "the split stage weights every slice"
        assert part.sums is not None, "losses of slices are not left to Keras"
        weight = tf.constant(1.0) if self.equal_weights else part.weight.value
        factor = weight if part.weight.summed or not self._scales_loss else weight / share
        gradients = self.add_gradients(total.gradients, part.gradients, factor)
        return RunningSums(gradients, total.divisor + weight, total.losses + part.sums.vector)

    def add_gradients(self, total: Gradients, gradients: Gradients, factor: Scalar | None = 1.0) -> list[Any]:
        """Adds gradients, times a factor, to the sum for each trainable weight."""
        sums, factor = list(total), None if self.equal_weights else factor
        for index, (variable, gradient) in enumerate(zip(self.variables, gradients, strict=True)):
            if gradient is not None:
                self.present.add(index)
                if total[index] is not None and not isinstance(total[index], tf.IndexedSlices):
                    say_rows_are_summed(self.model.optimizer, [gradient], [variable])
                sums[index] = accumulate_gradient(variable, sums[index], gradient, factor)
        return sums

    def present_gradients(self, total: Gradients) -> list[Any]:
        """Sums in the dtypes of the variables, or `None` where no slice has a gradient."""
        cast: list[Any] = [None] * len(self.variables)
        for index in self.present:
            cast[index] = tf.cast(total[index], self.variables[index].dtype)  # pyright: ignore
        return cast

    def merge(self, total: RunningSums, other: RunningSums) -> RunningSums:
        """Adds two sums."""
        gradients = self.add_gradients(total.gradients, other.gradients)
        return RunningSums(gradients, total.divisor + other.divisor, total.losses + other.losses)

    def gradient(self, total: RunningSums) -> Gradient:
        """The gradient of the batch, from the sums over all slices."""
        weight, sums = self.last.weight, self.last.sums
        divisor = tf.constant(1.0) if weight.summed else total.divisor
        factor = tf.math.reciprocal_no_nan(divisor)

        def mean(index: int, variable: keras.Variable) -> GradientTensor | None:
            if index not in self.present:
                return None
            gradient: Any = total.gradients[index]
            if not is_overwritten(variable):
                gradient = scale_gradient(gradient, factor)
            return tf.cast(gradient, variable.dtype)

        gradients = [mean(index, variable) for index, variable in enumerate(self.variables)]
        normalizer = Normalizer(divisor, weight.summed, weight.stated)
        return Gradient(gradients, None, normalizer, LossSums(total.losses, sums.form))
