"""The window: each replica's weighted sum of the gradients since the last update."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_paragrad._keras.mesh.dtensor import computing_on_mesh
from keras_paragrad._keras.objects.optimizer import WrappingOptimizer
from keras_paragrad._keras.objects.saved import SavedVariables
from keras_paragrad._keras.replicas.collectives import sum_over_replicas
from keras_paragrad._keras.step.apply import Contribution
from keras_paragrad._keras.storage.layout import in_shards
from keras_paragrad._keras.storage.sharded import on_this_replica


class GradientWindow(SavedVariables):
    """Accumulators for the gradients of an optimizer's variables.

    All methods but the constructor run in replica context and touch only that replica's state.

    Args:
        optimizer: The optimizer, already built.
        dtype: The accumulators' dtype, or `None` for that of each variable.
    """

    def __init__(self, optimizer: WrappingOptimizer, dtype: str | None):
        super().__init__()
        variables = optimizer.trainable_variables
        self.overwrites = [optimizer.overwrites(variable) for variable in variables]
        self.position = self.add("position", dtype="int64")
        self.weight = self.add("weight", local=True, aggregation="sum")
        # Optimizers around this one, such as a LossScaleOptimizer, pass its gradient on as it is.
        self.weight.overwrite_with_gradient = True
        # A variable that is overwritten by its gradient, such as a float8 scale, takes the largest; its values are
        # the same on all replicas and must not be summed when saved.
        self.accumulators = [
            self.add(
                f"accumulator_{index}",
                variable.shape,
                variable.dtype if overwrites or dtype is None else dtype,
                aggregation="mean" if overwrites else "sum",
                # One of a variable in shards is in shards itself, of the sum over all replicas.
                local=not in_shards([variable]),
                like=variable,
            )
            for index, (variable, overwrites) in enumerate(zip(variables, self.overwrites, strict=True))
        ]

    def add_gradients(
        self, indices: Sequence[int], gradients: Sequence, contribution: tf.Tensor | None, *, drop_nonfinite: bool
    ) -> None:
        """Adds one micro-batch's gradients.

        Args:
            indices: Indices of the optimizer's variables that the gradients belong to.
            gradients: Dense or `tf.IndexedSlices`.
            contribution: Their `Contribution` as a tensor; that of all is the same, if `None`.
            drop_nonfinite: Whether to skip the micro-batch if any gradient is infinite or NaN.
        """
        given = Contribution.of(None) if contribution is None else Contribution(*tf.unstack(contribution, 3))
        scale = None if contribution is None else given.scale
        before = tf.convert_to_tensor(self.weight.value)
        weight = before * given.kept + given.weight
        finite = _all_finite(gradients) if drop_nonfinite else None
        if finite is not None:
            weight = tf.where(finite, weight, before)
        self.weight.value.assign(weight)
        for index, gradient in zip(indices, gradients, strict=True):
            self._add(index, gradient, scale, finite)

    def _add(self, index: int, gradient, scale, finite) -> None:
        target = on_this_replica(self.accumulators[index])
        on_mesh = computing_on_mesh()
        if on_mesh:
            gradient = tf.convert_to_tensor(gradient)
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = tf.cast(values, target.dtype)
        if finite is not None:
            values = tf.where(finite, values, tf.zeros_like(values))
        if self.overwrites[index]:
            target.assign(tf.maximum(target, values))
        elif on_mesh:
            # The operations below end the process there.
            target.assign_add(values if scale is None else values * tf.cast(scale, values.dtype))
        elif isinstance(gradient, tf.IndexedSlices):
            # Under a strategy the variable has no `scatter_add`.
            scaled = values if scale is None else values * tf.cast(scale, values.dtype)
            tf.raw_ops.ResourceScatterAdd(resource=target.handle, indices=gradient.indices, updates=scaled)
        else:
            # A scaled addition in one pass over memory: the same operation as a step of gradient descent.
            alpha = -tf.cast(1.0 if scale is None else scale, values.dtype)
            tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=alpha, delta=values)

    def mean(self, indices: Sequence[int], variables: Sequence[keras.Variable]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradient of the whole window over all replicas, combined once, and the weight it was divided by.

        Args:
            indices: Indices of the optimizer's variables that have one.
            variables: Those variables.
        """
        # Without tf.identity, a multi-worker strategy can't place variables that are used inside a conditional.
        sums = [tf.identity(on_this_replica(self.accumulators[index])) for index in indices]
        averaged = [place for place, index in enumerate(indices) if not self.overwrites[index]]
        here = [place for place in averaged if not in_shards([variables[place]])]
        summed = sum_over_replicas([*(sums[place] for place in here), tf.identity(self.weight.value)])
        weight = summed[-1]
        for place, total in zip(here, summed[:-1], strict=True):
            sums[place] = total
        # One reciprocal, then multiplications: TensorFlow's `div_no_nan` of a tensor is several times slower.
        factor = tf.math.reciprocal_no_nan(weight)
        for place in averaged:
            sums[place] *= tf.cast(factor, sums[place].dtype)
        return sums, weight

    def clear(self) -> None:
        """Resets this replica's part of the window."""
        for variable in (self.weight, *self.accumulators):
            target = on_this_replica(variable)
            target.assign(tf.zeros(target.shape, target.dtype))


def _all_finite(gradients: Sequence) -> tf.Tensor:
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
