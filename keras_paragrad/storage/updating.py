"""Optimizers on divided variables: clipping, averages and steps with the result of whole variables."""

import contextlib
import functools
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index, sum_over_replicas
from keras_paragrad.compat.optimizer import accumulation_steps, held_optimizers, updating_optimizers
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Gradients, GradientTensor, Scalar, TensorVariable
from keras_paragrad.storage.row_gradients import dense_if_linear, scale_gradient
from keras_paragrad.storage.storage import any_divided, storage_of

# Optimizers whose steps compute each element independently; all others get whole variables, one at a time.
# Ftrl too: Keras's `add` looks at the shape of its accumulators, and takes a shard as long as a row for a bias.
_ELEMENTWISE = {
    optimizer.update_step
    for optimizer in (
        keras.optimizers.SGD,
        keras.optimizers.RMSprop,
        keras.optimizers.Adam,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Lion,
    )
}
# Methods that get gradients or weights, and might look at more than single elements.
_METHODS = (
    *("apply", "apply_gradients", "_backend_apply_gradients", "_backend_update_step"),
    *("_clip_gradients", "_clip_by_norm", "_update_model_variables_moving_average"),
)
# Of optimizers that update shards: in an update, the variables, and by replica the squared norms of their
# gradients in the same order; `()` between updates.
_NORMS = Slot[tuple[Any, ...] | None]("norms", None)


def check_optimizer_of_shards(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that would mistake shards for whole variables."""
    if accumulation_steps(optimizer) > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps), in a branch in which "
            "TensorFlow can't scatter them. Remove that argument, and compile with AccumulatingOptimizer(optimizer, "
            f"steps={accumulation_steps(optimizer)})."
        )
    for kind, name in itertools.product(map(type, held_optimizers(optimizer)), _METHODS):
        if getattr(kind, name).__module__.partition(".")[0] in ("keras", "keras_paragrad"):
            continue
        raise ValueError(
            f"{kind.__name__}.{name} overrides Keras's, and would get shards in place of whole gradients and weights. "
            "Move its code into update_step, as keras.optimizers.Optimizer documents it, which gets whole ones; or "
            "write DistributedFit(..., shard=None)."
        )


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer can update shards one by one."""
    return type(optimizer).update_step in _ELEMENTWISE and "update_step" not in vars(optimizer)


def clips_norms_of_shards(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> bool:
    """Whether an optimizer clips by norms, which are sums over the shards of variables."""
    clips = any(inner.clipnorm or inner.global_clipnorm for inner in updating_optimizers(optimizer))
    return clips and any_divided(variables)


def squared_norms(
    optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: Sequence[keras.Variable]
) -> list[tf.Tensor | None]:
    """The squared norms of whole gradients, as the innermost optimizer gets them; called on every replica.

    The gradients are summed over the replicas; those of divided variables are parts. The optimizer gets them, and may
    unscale them. Empty where no optimizer clips by norms, or no variable is divided.
    """
    if not clips_norms_of_shards(optimizer, variables):
        return []
    storages = [storage_of(variable) for variable in variables]
    scales_itself = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scale = optimizer.dynamic_scale if scales_itself else optimizer.loss_scale_factor
    squares: list[Any] = [
        None if gradient is None else storage.square(_unscale(gradient, scale))
        for gradient, storage in zip(gradients, storages, strict=True)
    ]
    divided = [index for index, square in enumerate(squares) if square is not None and storages[index].divided]
    for index, total in zip(divided, sum_over_replicas([squares[index] for index in divided]), strict=True):
        squares[index] = total
    return squares


def replace_norms(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
) -> None:
    """Makes an optimizer clip by the norms of these whole, unscaled gradients, and not by `squared_norms`.

    Called on every replica, within `updating`.
    """
    owners, norms = _NORMS.of(next(iter(updating_optimizers(optimizer)))) or ((), {})
    if not norms.get(replica_index()):
        return
    changed = {
        optimizer._var_key(variable): tf.reduce_sum(tf.square(_unscale(gradient, None)))
        for gradient, variable in zip(gradients, variables, strict=True)
    }
    pairs = zip(owners, norms[replica_index()], strict=True)
    norms[replica_index()] = [changed.get(optimizer._var_key(variable), old) for variable, old in pairs]


def install_storages(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Makes an optimizer, and the optimizers in it, update variables by their storages; may be called again."""
    storages = [storage_of(variable) for variable in variables]
    for inner in updating_optimizers(optimizer):
        # Bypass `__setattr__`: Keras tracks what is assigned.
        attributes = vars(inner)
        if any(storage.divided for storage in storages) and _NORMS.of(inner) is None:
            _NORMS.attach(inner, ())
            attributes["_clip_gradients"] = functools.partial(_clip, inner)
            attributes["_update_model_variables_moving_average"] = functools.partial(_average, inner)
        if any(storage.divided or not storage.takes_steps_of(inner) for storage in storages):
            attributes.setdefault("_backend_update_step", functools.partial(_step, inner))


@contextlib.contextmanager
def updating(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    norms: dict[int, Sequence[tf.Tensor | None]],
) -> Generator[None]:
    """Context in which a built optimizer updates variables by their storages; entered in cross-replica context.

    `norms` are the results of `squared_norms`, by replica.
    """
    # The model may have been built since `install_storages` was called.
    install_storages(optimizer, variables)
    installed = [inner for inner in updating_optimizers(optimizer) if _NORMS.of(inner) is not None]
    for inner in installed:
        _NORMS.attach(inner, (variables, norms))
    with contextlib.ExitStack() as stack:
        for variable in variables:
            stack.enter_context(storage_of(variable).updating())
        yield


def refresh(variables: Sequence[keras.Variable]) -> None:
    """Ends an update of variables; called on every replica."""
    for variable in variables:
        storage_of(variable).refresh()


def _unscale(gradient: Any, scale: Scalar | None) -> Any:
    value = tf.cast(gradient, "float32")
    return value if scale is None else scale_gradient(value, 1 / scale)


def _clip(optimizer: keras.optimizers.Optimizer, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`_clip_gradients`, by the norms of whole gradients."""
    state = _NORMS.of(optimizer)
    if not state or not (optimizer.clipnorm or optimizer.global_clipnorm):
        return type(optimizer)._clip_gradients(optimizer, grads)
    variables, norms = state
    updated = {
        optimizer._var_key(variable)
        for variable in optimizer._trainable_variables
        if not variable.overwrite_with_gradient
    }
    pairs = [
        (storage_of(variable), square)
        for variable, square in zip(variables, norms[replica_index()], strict=True)
        if square is not None and optimizer._var_key(variable) in updated
    ]
    if optimizer.clipnorm:
        return [_clip_to(g, optimizer.clipnorm, tf.sqrt(square)) for g, (_, square) in zip(grads, pairs, strict=True)]
    norm = tf.sqrt(tf.add_n([square for _, square in pairs]))
    # As in Keras, which makes gradients dense when it clips them by the norm of all.
    own = [
        tf.convert_to_tensor(storage.scatter(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient)
        for gradient, (storage, _) in zip(grads, pairs, strict=True)
    ]
    return [_clip_to(gradient, optimizer.global_clipnorm, norm) for gradient in own]


def _clip_to(gradient: GradientTensor, limit: float, norm: tf.Tensor) -> Any:
    return scale_gradient(gradient, limit / tf.maximum(norm, limit))


def _average(optimizer: keras.optimizers.Optimizer, trainable_variables: Sequence[keras.Variable]) -> None:
    """`_update_model_variables_moving_average`, without gathering the weights."""
    if not optimizer.use_ema:
        return
    # As in Keras, the first average is the weights themselves.
    momentum = tf.cast(tf.not_equal(optimizer.iterations, 0), "float32") * optimizer.ema_momentum
    averages = optimizer._model_variables_moving_average
    pairs = [
        (variable, average)
        for variable, average in zip(trainable_variables, averages, strict=True)
        if average is not None
    ]

    def merge(strategy: tf.distribute.Strategy, momentum: tf.Tensor) -> None:
        for variable, average in pairs:
            strategy.extended.update(average.value, _blend, args=(variable.value, momentum), group=False)

    tf.distribute.get_replica_context().merge_call(merge, args=(momentum,))


def _blend(average: TensorVariable, value: TensorVariable, momentum: tf.Tensor) -> object:
    momentum = tf.cast(momentum, average.dtype)
    return average.assign(momentum * average + (1 - momentum) * tf.convert_to_tensor(value))


def _step(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[GradientTensor],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: Scalar,
) -> None:
    """`_backend_update_step`, at once if the storages take it, or one variable after another."""
    storages = [storage_of(variable) for variable in trainable_variables]
    if all(storage.takes_steps_of(optimizer) for storage in storages):
        grads = [
            dense_if_linear(
                optimizer, storage.scatter(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
            )
            for storage, gradient in zip(storages, grads, strict=True)
        ]
        type(optimizer)._backend_update_step(optimizer, grads, trainable_variables, learning_rate)
        return
    after: list[tf.Tensor] = []
    for gradient, variable in zip(grads, trainable_variables, strict=True):
        after = storage_of(variable).update(optimizer, gradient, learning_rate, after)
