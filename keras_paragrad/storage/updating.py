"""Optimizers on variables that live elsewhere: what Keras does to whole variables, done with the same result."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import nested, parts
from keras_paragrad.compat.collectives import replica_index, sum_over_replicas
from keras_paragrad.compat.state import state_of
from keras_paragrad.storage.storage import storage_of

# Their steps compute each element from that element alone. All others are given whole variables, one at a time. So is
# Ftrl: Keras's `add` looks at the whole shape of its accumulators, and takes a shard as long as a row for a bias.
_ELEMENTWISE = {
    each.update_step
    for each in (
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


# What is given gradients or weights, and can't be told from the outside to look at single elements only.
_BESIDE = ("apply", "apply_gradients", "_backend_apply_gradients", "_backend_update_step")
_BESIDE += ("_clip_gradients", "_clip_by_norm", "_update_model_variables_moving_average")


def own_update(optimizer: Any) -> str | None:
    """The method of an optimizer's own, beside `update_step`, that would be given shards as if they were whole."""
    for part in (*nested(optimizer), *parts(optimizer)):
        for name in _BESIDE:
            found = getattr(type(part), name)
            if found.__module__.partition(".")[0] not in ("keras", "keras_paragrad"):
                return f"{type(part).__name__}.{name}"
    return None


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer's step may be taken shard by shard."""
    return type(optimizer).update_step in _ELEMENTWISE and "update_step" not in vars(optimizer)


def squares(optimizer: Any, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """The squared norms of whole gradients, as the innermost optimizer is given them; called on every replica.

    Args:
        optimizer: The optimizer that is given the gradients, and may unscale them.
        gradients: What is left of them on this replica, or `None`.
        variables: Their variables.

    Returns:
        A scalar for each gradient, or nothing where no optimizer clips by norms, or Keras itself can.
    """
    storages = [storage_of(variable) for variable in variables]
    clips = any(part.clipnorm or part.global_clipnorm for part in parts(optimizer))
    if not clips or not any(each.divided for each in storages):
        return []
    scale = optimizer.dynamic_scale if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    found: list[Any] = [
        None if each is None else storage.square(_unscaled(each, scale))
        for each, storage in zip(gradients, storages, strict=True)
    ]
    cut = [place for place, each in enumerate(found) if each is not None and storages[place].divided]
    for place, total in zip(cut, sum_over_replicas([found[place] for place in cut]), strict=True):
        found[place] = total
    return found


def measure_again(optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
    """Has an optimizer clip by the norms of whole gradients, unscaled, in place of what `squares` has found.

    Called on every replica, within `updating`.
    """
    keys, norms = state_of(next(iter(parts(optimizer)))).norms or ((), {})
    if not norms.get(replica_index()):
        return
    changed = {
        optimizer._var_key(variable): tf.reduce_sum(tf.square(_unscaled(gradient, None)))
        for gradient, variable in zip(gradients, variables, strict=True)
    }
    norms[replica_index()] = [changed.get(key, old) for key, old in zip(keys, norms[replica_index()], strict=True)]


def install(optimizer: Any, variables: Sequence[keras.Variable]) -> None:
    """Has an optimizer, and those that it delegates to, update variables where they live; once is enough."""
    storages = [storage_of(variable) for variable in variables]
    for part in parts(optimizer):
        # Bypass `__setattr__`: Keras tracks what is assigned.
        own = vars(part)
        if any(each.divided for each in storages) and state_of(part).norms is None:
            state_of(part).norms = ()
            own["_clip_gradients"] = functools.partial(_clip, part)
            own["_update_model_variables_moving_average"] = functools.partial(_average, part)
        if not all(each.takes_steps_of(part) for each in storages):
            own.setdefault("_backend_update_step", functools.partial(_step, part))


@contextlib.contextmanager
def updating(optimizer: Any, variables: Sequence[keras.Variable], norms: dict[int, list[Any]]) -> Iterator[None]:
    """Context in which an optimizer updates variables where they live; entered outside of the replicas.

    Args:
        optimizer: A built optimizer.
        variables: The variables that it updates.
        norms: By replica, what `squares` has found.
    """
    installed = [part for part in parts(optimizer) if state_of(part).norms is not None]
    keys = [optimizer._var_key(variable) for variable in variables] if installed else []
    for part in installed:
        state_of(part).norms = keys, norms
    with contextlib.ExitStack() as stack:
        for variable in variables:
            stack.enter_context(storage_of(variable).updating())
        yield


def refresh(variables: Sequence[keras.Variable]) -> None:
    """Ends the update of variables; called on every replica."""
    for variable in variables:
        storage_of(variable).refresh()


def _unscaled(gradient: Any, scale: Any) -> tf.Tensor:
    value = tf.cast(tf.convert_to_tensor(gradient), "float32")
    return value if scale is None else value / scale


def _clip(part: Any, grads: Sequence[Any]) -> list[Any]:
    """Keras's three ways to clip, with the norms of whole gradients."""
    found = state_of(part).norms
    if not found or not (part.clipnorm or part.global_clipnorm):
        return type(part)._clip_gradients(part, grads)
    keys, norms = found
    updated = {
        part._var_key(variable) for variable in part._trainable_variables if not variable.overwrite_with_gradient
    }
    found = [
        square
        for square, key in zip(norms[replica_index()], keys, strict=True)
        if square is not None and key in updated
    ]
    if part.clipnorm:
        return [_times(g, part.clipnorm, tf.sqrt(square)) for g, square in zip(grads, found, strict=True)]
    norm = tf.sqrt(tf.add_n(found))
    return [_times(gradient, part.global_clipnorm, norm) for gradient in grads]


def _times(gradient: Any, most: float, norm: tf.Tensor) -> tf.Tensor:
    factor = tf.cast(most / tf.maximum(norm, most), gradient.dtype)
    return tf.convert_to_tensor(gradient) * factor


def _average(part: Any, trainable_variables: Sequence[keras.Variable]) -> None:
    """Keras's moving average of weights, without gathering them."""
    if not part.use_ema:
        return
    # As Keras: the first average is the weights themselves.
    momentum = tf.cast(tf.not_equal(part.iterations, 0), "float32") * part.ema_momentum
    averages = part._model_variables_moving_average
    pairs = [
        (each, average) for each, average in zip(trainable_variables, averages, strict=True) if average is not None
    ]

    def merged(strategy: Any, momentum: Any) -> None:
        for variable, average in pairs:
            strategy.extended.update(average.value, _blend, args=(variable.value, momentum), group=False)

    tf.distribute.get_replica_context().merge_call(merged, args=(momentum,))


def _blend(average: Any, value: Any, momentum: Any) -> Any:
    share = tf.cast(momentum, average.dtype)
    return average.assign(share * average + (1 - share) * tf.convert_to_tensor(value))


def _step(part: Any, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any) -> None:
    """Has each variable updated where it lives, one after the other."""
    done: list[tf.Tensor] = []
    for gradient, variable in zip(grads, trainable_variables, strict=True):
        done = storage_of(variable).update(part, gradient, learning_rate, done)
