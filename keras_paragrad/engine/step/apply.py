"""The *apply* stage: passes a batch's gradient to the optimizer on every replica.

An accumulation window is the micro-batches between two updates of an accumulating optimizer. A variable is divided if
each replica holds a shard of it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    OnReplicas,
    cross_replica,
    replica_count,
    replica_index,
    run_if,
    sum_over_replicas,
)
from keras_paragrad.compat.operations import BaseOptimizer
from keras_paragrad.compat.optimizer import (
    UnreducedOptimizers,
    build_optimizer,
    find_accumulator,
    held_optimizers,
    nested_optimizers,
    unwrap_loss_scale,
    updating_optimizers,
)
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import Gradients, GradientTensor, Scalar
from keras_paragrad.engine.losses.divisors import Divisor
from keras_paragrad.engine.step.interception import noticing_applies
from keras_paragrad.storage.row_gradients import scale_gradient, warn_of_lookups
from keras_paragrad.storage.storage import (
    any_divided,
    reduce_divided_gradients,
    reduce_gradients,
    reduce_overwritten,
    scatter_gradients,
)
from keras_paragrad.storage.updating import refresh, squared_norms, updating


class Contribution(NamedTuple):
    """How a replica adds its gradient to an accumulation window: three float32 scalars.

        gradients <- gradients + scale * gradient,    weights <- decay * weights + weight

    At the end, the update is (sum of `gradients` over replicas) / (sum of `weights` over replicas). `decay` is 0 if the
    loss is a sum, so that the sum of `weights` stays 1.
    """

    scale: Scalar
    weight: Scalar
    decay: Scalar = 1.0

    @classmethod
    def of(cls, divisor: Divisor | None, *, same: bool = False) -> "Contribution":
        """The contribution of a gradient whose loss has this divisor; without one, all gradients count equally.

        `same` says whether every replica has the gradient of the whole batch, rather than of its own rows.
        """
        replicas = 1 if same else replica_count()
        if divisor is None or divisor.summed:
            # The replicas' weights sum to 1.
            return cls(1.0, 1.0 / replicas, decay=1.0 if divisor is None else 0.0)
        value = tf.cast(divisor.value, "float32")
        # The gradient's loss was multiplied by the equal share.
        return cls(value * replicas, value)


def apply_gradient(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    gradients: Gradients,
    contribution: Contribution | None = None,
    *,
    reduce_first: bool,
    also_reduce: Sequence[tf.Tensor] = (),
    reduced: bool = False,
) -> list[tf.Tensor] | None:
    """Passes gradients to an optimizer; called on every replica.

    With `reduce_first`, gradients are all-reduced before they are clipped, as one device clips the batch's gradient.
    Otherwise Keras's optimizer all-reduces gradients after clipping. An accumulating optimizer all-reduces its sums.
    `reduced` says that every replica has the batch's gradient already. Without `contribution`, all gradients count
    equally in a window.

    Returns the sums of `also_reduce`, from the same collective, or `None` if gradients were not all-reduced here.
    """
    if not variables:
        # As in Keras: the step still updates metrics and non-trainable state.
        warn_once(optimizer, "The model does not have any trainable weights.")
        return None
    gradients = reduce_overwritten(gradients, variables)
    accumulator = find_accumulator(optimizer)
    if accumulator or replica_count() == 1 or not reduce_first:
        if accumulator:
            # Gradients of sharded variables are accumulated in shards, so they are weighted and reduced here.
            gradients = reduce_divided_gradients(gradients, variables, contribution.scale if contribution else None)
        if accumulator and reduce_first and replica_count() > 1 and _skips_nonfinite(optimizer, variables):
            gradients = _nonfinite_everywhere(gradients)
        pairs = list(zip(gradients, variables, strict=True))
        if accumulator and contribution is not None:
            # A dummy variable's "gradient" carries the contribution through the optimizers around the accumulating one.
            build_optimizer(optimizer, variables)
            pairs.append((tf.stack(contribution), accumulator.gradient_weight))
        optimizer.apply_gradients(pairs)
        return None
    if held := [inner for inner in held_optimizers(optimizer) if getattr(inner, "accumulates", False)]:
        raise ValueError(
            f"{optimizer.name} hands gradients that are summed over the replicas to {held[0].name}, which accumulates "
            f"them and would sum them again. Wrap the outermost: AccumulatingOptimizer({optimizer.name}, steps=...)."
        )
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    own, owners = [gradients[index] for index in present], [variables[index] for index in present]
    applied, sums = (scatter_gradients(own, owners), []) if reduced else reduce_gradients(own, owners, also_reduce)
    if not reduced:
        warn_of_lookups(optimizer, own, applied, owners)
    by_index = dict(zip(present, applied, strict=True))
    total = [by_index.get(index) for index in range(len(gradients))]
    if any_divided(variables) and unwrap_loss_scale(optimizer) is not optimizer:
        total = _nonfinite_everywhere(total)
    # The optimizer clips shards by the norms of whole gradients.
    norms = squared_norms(optimizer, total, variables)
    cross_replica(
        lambda per_replica, total, norms: apply_everywhere(per_replica, optimizer, total, variables, norms),
        total,
        norms,
    )
    return sums


def apply_same(
    optimizer: keras.optimizers.Optimizer,
    gradients: Gradients,
    variables: Sequence[keras.Variable],
    contribution: Contribution | None = None,
) -> None:
    """Passes the whole batch's gradients, which every replica has, to an optimizer on every replica."""
    counted = None
    if find_accumulator(optimizer):
        # The window sums over the replicas. Only the first replica's gradient counts, as equal shares would be rounded.
        first = tf.constant(float(replica_index() == 0))
        scale, weight, decay = contribution or Contribution(1.0, 1.0)
        counted = Contribution(scale * first, weight * first, decay)
    apply_gradient(optimizer, variables, gradients, counted, reduce_first=True, reduced=True)


def _skips_nonfinite(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> bool:
    """Whether the optimizer skips gradients that overflow, and may not see an overflow on another replica."""
    skips = unwrap_loss_scale(optimizer) is not optimizer
    # Replicas hold different shards of the same gradients.
    return skips or (
        any_divided(variables)
        and any(getattr(inner, "skip_nonfinite", False) for inner in nested_optimizers(optimizer))
    )


def _nonfinite_everywhere(gradients: Gradients) -> list[GradientTensor | None]:
    """Makes gradients NaN on all replicas if one overflows. A `LossScaleOptimizer` looks at the first replica only."""
    values = [
        gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
        if gradient is not None
    ]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    (elsewhere,) = sum_over_replicas([tf.cast(tf.logical_not(finite), "float32")])
    poison = tf.where(elsewhere > 0, float("nan"), 1.0)
    return [scale_gradient(gradient, poison) for gradient in gradients]


def apply_everywhere(
    per_replica: OnReplicas,
    optimizer: keras.optimizers.Optimizer,
    gradients: Gradients,
    variables: Sequence[keras.Variable],
    norms: Sequence[tf.Tensor | None] = (),
) -> None:
    """Applies all-reduced gradients on every replica; called in cross-replica context, with a built optimizer.

    `per_replica` is what `cross_replica` passes to its function. Gradients and squared norms are grouped by replica.
    """
    norms_by_replica: dict[int, Sequence[tf.Tensor | None]] = {}
    unreduced = UnreducedOptimizers()

    def apply(gradients: Gradients, norms: Sequence[tf.Tensor | None]):
        norms_by_replica[replica_index()] = norms
        # Keeps each nested optimizer that updates from summing the gradients over the replicas again.
        with noticing_applies(unreduced.add):
            optimizer.apply(gradients, variables)

    frequencies = [(inner, inner.ema_overwrite_frequency) for inner in updating_optimizers(optimizer)]
    counts = [_update_count(inner) if inner.use_ema and frequency else None for inner, frequency in frequencies]
    for inner, _ in frequencies:
        unreduced.add(inner)
        # Keras would overwrite weights in a branch on each replica, where a strategy can't update variables.
        inner.ema_overwrite_frequency = None
    try:
        with updating(optimizer, variables, norms_by_replica):
            per_replica(apply, gradients, norms)
    finally:
        for inner, frequency in frequencies:
            inner.ema_overwrite_frequency = frequency
        unreduced.restore()
    # Constraints read the averages from the shards, within `updating`: copies of shards are outdated until `refresh`.
    with updating(optimizer, variables, norms_by_replica):
        for (inner, frequency), earlier in zip(frequencies, counts, strict=True):
            if earlier is not None and inner.built:
                now = _update_count(inner)
                # A loss scale may have skipped the update. Before the first update, averages are zeros.
                due = tf.logical_and(tf.not_equal(now, earlier), tf.equal(now % frequency, 0))
                run_if(due, functools.partial(_overwrite_with_average, per_replica, inner))
    per_replica(functools.partial(refresh, variables))


def _update_count(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    return tf.identity(tf.convert_to_tensor(optimizer.iterations))


def _overwrite_with_average(per_replica: OnReplicas, optimizer: keras.optimizers.Optimizer) -> None:
    """Replaces weights by their moving averages, and applies constraints."""
    variables = optimizer._trainable_variables

    def constrain():
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    # Keras calls this at the end of `fit`. A user's optimizer may override it to do more, so the base class is called.
    BaseOptimizer.finalize_variable_values(optimizer, variables)
    per_replica(constrain)
