"""The window: each replica's weighted sum of the gradients since the last update."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.optimizer import WrappingOptimizer
from keras_paragrad.compat.saved import SavedVariables
from keras_paragrad.engine.step.apply import Contribution
from keras_paragrad.storage.gradients import reduce_replicated_gradients
from keras_paragrad.storage.storage import storage_of


class GradientWindow(SavedVariables):
    """Accumulators for the gradients of an optimizer's variables.

    All methods but the constructor run in replica context and touch only that replica's state.

    Args:
        optimizer: The optimizer, already built.
        dtype: The accumulators' dtype, or `None` for that of each variable.
    """

    _replaced: set[int]
    _added: set[int]

    def __init__(self, optimizer: WrappingOptimizer, dtype: str | None):
        super().__init__()
        # Whose sums gradients have replaced, and been added to, in any trace. Bypass tracking.
        self.__dict__.update(_replaced=set(), _added=set())
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
                # One of a divided variable is divided itself, and has the sum over all replicas.
                local=not storage_of(variable).divided,
                like=variable,
            )
            for index, (variable, overwrites) in enumerate(zip(variables, self.overwrites, strict=True))
        ]

    def add_gradients(
        self, indices: Sequence[int], gradients: Sequence, contribution: tf.Tensor | None, *, drop_nonfinite: bool
    ) -> None:
        """Adds one micro-batch's gradients, or begins anew with them, after an update.

        Args:
            indices: Indices of the optimizer's variables that the gradients belong to.
            gradients: Dense or `tf.IndexedSlices`.
            contribution: Their `Contribution` as a tensor; that of all is the same, if `None`.
            drop_nonfinite: Whether to skip the micro-batch if any gradient is infinite or NaN.
        """
        given = Contribution.of(None) if contribution is None else Contribution(*tf.unstack(contribution, 3))
        scale = None if contribution is None else given.scale
        before = tf.convert_to_tensor(self.weight.value)
        # The sums of an emptied window are still there, and have the weight zero; that of sums to add to is minus zero.
        first = tf.equal(tf.math.reciprocal(before), float("inf"))
        finite = _all_finite(gradients) if drop_nonfinite else None
        # With data of unknown length, a counter must not advance for a batch that turns out not to exist.
        with tf.control_dependencies(None if tf.executing_eagerly() else gradients):
            weight = before * given.kept + given.weight
            weight = tf.where(tf.equal(weight, 0.0), -tf.abs(weight), weight)
            if finite is not None:
                weight = tf.where(finite, weight, before)
            self.weight.value.assign(weight)
        storages = [storage_of(accumulator) for accumulator in self.accumulators]
        pairs = zip(indices, gradients, strict=True)
        replaced = {index for index, each in pairs if storages[index].replaces and not _is_sparse(each)}
        added = set(indices) - replaced
        for index, storage in enumerate(storages):
            # What is never replaced is cleared by each update: adding single rows is not to touch the others.
            if index not in replaced and (index not in added or index in self._replaced):
                storage.reset(first)
        self._replaced |= replaced
        self._added |= added
        for index, gradient in zip(indices, gradients, strict=True):
            self._add(index, gradient, scale, finite, first)

    def _add(self, index: int, gradient: Any, scale: Any, finite: Any, first: Any) -> None:
        storage = storage_of(self.accumulators[index])
        rows = gradient.indices if _is_sparse(gradient) else None
        values: Any = gradient if rows is None else gradient.values
        values = tf.cast(values, storage.local.dtype)
        if finite is not None:
            values = tf.where(finite, values, tf.zeros_like(values))
        if self.overwrites[index]:
            storage.local.assign(tf.maximum(tf.where(first, tf.zeros_like(values), storage.local), values))
        else:
            shape = None if rows is None else gradient.dense_shape
            storage.accumulate(values if rows is None else tf.IndexedSlices(values, rows, shape), scale, first)

    def mean(self, indices: Sequence[int], variables: Sequence[keras.Variable]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradient of the whole window over all replicas, combined once, and the weight it was divided by.

        Args:
            indices: Indices of the optimizer's variables that have one.
            variables: Those variables.
        """
        # Without tf.identity, a multi-worker strategy can't place variables that are used inside a conditional.
        sums = [tf.identity(storage_of(self.accumulators[index]).local) for index in indices]
        averaged = [place for place, index in enumerate(indices) if not self.overwrites[index]]
        totals, (weight,) = reduce_replicated_gradients(
            [sums[place] for place in averaged],
            [variables[place] for place in averaged],
            [tf.identity(self.weight.value)],
        )
        # One reciprocal, then multiplications: TensorFlow's `div_no_nan` of a tensor is several times slower.
        factor = tf.math.reciprocal_no_nan(weight)
        for place, total in zip(averaged, totals, strict=True):
            sums[place] = total * tf.cast(factor, total.dtype)
        return sums, weight

    def clear(self) -> None:
        """Empties this replica's part of the window. The next gradients replace the sums that aren't cleared."""
        self.weight.value.assign(0.0)
        for index, accumulator in enumerate(self.accumulators):
            if index not in self._replaced - self._added:
                storage_of(accumulator).reset(True)


def _is_sparse(gradient: Any) -> bool:
    """Whether a gradient has single rows alone."""
    return isinstance(gradient, tf.IndexedSlices)


def _all_finite(gradients: Sequence) -> tf.Tensor:
    values = [gradient.values if _is_sparse(gradient) else gradient for gradient in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
