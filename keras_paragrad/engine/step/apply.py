"""The *apply* stage: passes the gradient of a batch to the optimizer on every replica."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import Accumulating, accumulating, nested, parts, unscaled
from keras_paragrad.compat.collectives import (
    cross_replica,
    replica_count,
    replica_index,
    run_if,
    sum_over_replicas,
)
from keras_paragrad.engine.step.forward import Normalizer
from keras_paragrad.storage.layout import divided, reduced, reduced_divided
from keras_paragrad.storage.row_gradients import scaled_gradient
from keras_paragrad.storage.updating import refresh, squares, updating

_REDUCE = "_all_reduce_sum_gradients"


class Contribution(NamedTuple):
    """What a replica's gradient contributes to an accumulation window: three float32 scalars.

    Attributes:
        scale: What the gradient is multiplied with.
        weight: What it adds to the window's weight on this replica, by which the sum of all gradients is divided.
        kept: The factor of the weight that the window has already: 0 if gradients are summed and not averaged.
    """

    scale: Any
    weight: Any
    kept: Any = 1.0

    @classmethod
    def of(cls, normalizer: Normalizer | None) -> "Contribution":
        """That of a gradient whose loss was divided by a normalizer; every gradient's is the same, if `None`."""
        # Keras divides the loss by the number of replicas, so that their gradients can be summed.
        share = 1.0 / replica_count()
        if normalizer is None:
            return cls(1.0, share)
        if normalizer.summed:
            return cls(1.0, share, kept=0.0)
        value = tf.cast(normalizer.value, "float32")
        return cls(value / share, value)


def apply_gradient(
    model: keras.Model,
    gradients: list[Any],
    weight: Normalizer | None = None,
    *,
    whole: bool,
    beside: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor] | None:
    """Passes gradients to the model's optimizer; called on every replica.

    Args:
        model: A compiled model.
        gradients: A gradient for each of its `trainable_weights`, or `None`.
        weight: What they count for in an accumulation window, or `None` if all count the same.
        whole: Whether the sum over the replicas is exactly the gradient of the batch. Then gradients are all-reduced
            before they are clipped, so the step is that of one device. An accumulating optimizer does that itself.
        beside: Other tensors to all-reduce, in the same collective.

    Returns:
        Their sums, or `None` if gradients were not all-reduced here.
    """
    optimizer, variables = model.optimizer, model.trainable_weights
    if not variables:
        # As in Keras: such a model is still run for its metrics and its layers' non-trainable state.
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return None
    accumulator = accumulating(optimizer)
    if accumulator or replica_count() == 1 or not whole:
        contribution = None if weight is None else Contribution.of(weight)
        if accumulator:
            # What is divided is accumulated in parts, so it is reduced here, weighted as it counts.
            gradients = reduced_divided(gradients, variables, contribution.scale if contribution else None)
        if accumulator and whole and replica_count() > 1 and _skips_nonfinite(optimizer, variables):
            gradients = _nonfinite_everywhere(gradients)
        pairs = list(zip(gradients, variables, strict=True))
        if accumulator and contribution is not None:
            pairs.append(_weighting(optimizer, accumulator, variables, contribution))
        optimizer.apply_gradients(pairs)
        return None
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    applied, sums = reduced([gradients[index] for index in present], [variables[index] for index in present], beside)
    by_index = dict(zip(present, applied, strict=True))
    total = [by_index.get(index) for index in range(len(gradients))]
    if divided(variables) and unscaled(optimizer) is not optimizer:
        total = _nonfinite_everywhere(total)
    norms = squares(optimizer, total, variables)
    cross_replica(
        lambda per_replica, total, norms: apply_everywhere(per_replica, optimizer, total, variables, norms),
        total,
        norms,
    )
    return sums


def _weighting(
    optimizer: Any, accumulator: Accumulating, variables: Sequence[keras.Variable], contribution: Contribution
) -> tuple[tf.Tensor, keras.Variable]:
    """What tells an accumulating optimizer, through those around it, what the gradients beside it count for."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
    return tf.stack(contribution), accumulator.gradient_weight


def _skips_nonfinite(optimizer: Any, variables: Sequence[keras.Variable]) -> bool:
    """Whether all replicas have to know of an overflow on one."""
    skips = unscaled(optimizer) is not optimizer
    # Replicas hold different parts of the same gradients.
    return skips or (divided(variables) and any(getattr(each, "skip_nonfinite", False) for each in nested(optimizer)))


def _nonfinite_everywhere(gradients: list[Any]) -> list[Any]:
    """NaN on every replica if any replica overflows: a `LossScaleOptimizer` checks only the first one's gradients."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    (elsewhere,) = sum_over_replicas([tf.cast(tf.logical_not(finite), "float32")])
    poison = tf.where(elsewhere > 0, float("nan"), 1.0)
    return [scaled_gradient(gradient, poison) for gradient in gradients]


def apply_everywhere(per_replica, optimizer: keras.optimizers.Optimizer, gradients, variables, norms=()) -> None:
    """Applies all-reduced gradients on every replica; called in cross-replica context.

    Args:
        per_replica: Runs a function on every replica; see `keras_paragrad.compat.collectives.cross_replica`.
        optimizer: A built optimizer.
        gradients: A gradient or `None` for each variable, grouped by replica.
        variables: The variables that the optimizer was built with.
        norms: What `squares` has found, grouped by replica.
    """
    by_replica: dict[int, Any] = {}

    def apply(gradients, norms):
        by_replica[replica_index()] = norms
        optimizer.apply(gradients, variables)

    frequencies = [(part, part.ema_overwrite_frequency) for part in parts(optimizer)]
    made = [_updates_made(part) if part.use_ema and frequency else None for part, frequency in frequencies]
    before = [part.__dict__.get(_REDUCE) for part, _ in frequencies]
    for part, _ in frequencies:
        part.__dict__[_REDUCE] = list
        # Keras overwrites in a branch on each replica, and a strategy refuses to update a variable in there.
        part.ema_overwrite_frequency = None
    try:
        with updating(optimizer, variables, by_replica):
            per_replica(apply, gradients, norms)
    finally:
        for (part, frequency), replaced in zip(frequencies, before, strict=True):
            part.ema_overwrite_frequency = frequency
            if replaced is None:
                del part.__dict__[_REDUCE]
            else:
                part.__dict__[_REDUCE] = replaced
    # The copies are those from before the update, and constraints read the averages.
    with updating(optimizer, variables, by_replica):
        for (part, frequency), earlier in zip(frequencies, made, strict=True):
            if earlier is not None and part.built:
                now = _updates_made(part)
                # Not after an update that a loss scale skipped: before the first one, averages are zeros.
                due = tf.logical_and(tf.not_equal(now, earlier), tf.equal(now % frequency, 0))
                run_if(due, functools.partial(_overwrite_with_average, per_replica, part))
    per_replica(functools.partial(refresh, variables))


def _updates_made(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    return tf.identity(tf.convert_to_tensor(optimizer.iterations))


def _overwrite_with_average(per_replica, optimizer: keras.optimizers.Optimizer) -> None:
    variables = optimizer._trainable_variables

    def constrain():
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    optimizer._overwrite_model_variables_with_average_value(variables)
    per_replica(constrain)
