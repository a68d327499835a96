"""Replaces the `apply` of optimizers, and no other module does.

within the innermost optimizer's `apply`: observe the gradients, transform, apply, show the update to telemetry
within any optimizer's `apply`, in a context: hand over the call (`capturing_applies`), or note it
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.operations import BaseOptimizer
from keras_paragrad.compat.optimizer import accumulation_steps, warn_of_summed_rows
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.state import Slot, patch_of, replace_methods, restore_methods
from keras_paragrad.compat.types import Gradients, GradientTensor
from keras_paragrad.engine.step.stages import Transform
from keras_paragrad.engine.telemetry.watch import Observation, UpdateWatch
from keras_paragrad.storage.row_gradients import is_overwritten
from keras_paragrad.storage.storage import gather_gradients, scatter_gradients
from keras_paragrad.storage.updating import replace_norms

PlainApply = Callable[[Gradients, Sequence[keras.Variable] | None], None]
# Called in place of an optimizer's `apply`, with the original method and the arguments.
Interceptor = Callable[[PlainApply, Gradients, Sequence[keras.Variable] | None], None]
# Called in place of any optimizer's `apply`, with the optimizer, the gradients and their variables.
Handler = Callable[[keras.optimizers.Optimizer, list[GradientTensor | None], list[keras.Variable]], None]
# For an intercepted optimizer, a dict with the `apply` that was an attribute of the object, if there was one.
_REPLACED = Slot[dict[str, Any] | None]("interception", None)
# An optimizer's *transform* stage.
_TRANSFORM = Slot[Transform | None]("transform", None)


class _Handlers(NamedTuple):
    """What this thread calls for any `apply`: the `handler` in its place, or all `notices` before it."""

    handler: Handler | None = None
    notices: tuple[Callable[[keras.optimizers.Optimizer], None], ...] = ()


def _apply(
    handlers: _Handlers | None,
    original: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    grads: Gradients,
    trainable_variables: Sequence[keras.Variable] | None = None,
    **keywords: object,
) -> None:
    """Replaces `apply` of any optimizer: calls this thread's handler, or the original if there is no handler."""
    handlers = handlers or _Handlers()
    if handlers.handler is not None:
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        with _PATCH.open(handlers._replace(handler=None)):
            handlers.handler(optimizer, list(grads), list(variables))
        return
    for notice in handlers.notices:
        notice(optimizer)
    original(optimizer, grads, trainable_variables, **keywords)


def _classes_with_apply(kind: type) -> Iterator[type]:
    """Yields a class and its subclasses, if they define `apply`."""
    if "apply" in vars(kind):
        yield kind
    for subclass in kind.__subclasses__():
        yield from _classes_with_apply(subclass)


# All optimizer classes: a step may use any optimizer, from anywhere.
_PATCH = ProcessPatch[_Handlers](
    lambda: [Replacement(kind, "apply", _apply) for kind in _classes_with_apply(BaseOptimizer)]
)


def intercept_apply(optimizer: keras.optimizers.Optimizer, intercept: Interceptor | None) -> None:
    """Makes an optimizer's `apply` call `intercept`; `None` restores `apply`."""
    replaced = _REPLACED.of(optimizer)
    if replaced is not None:
        restore_methods(optimizer, "apply")
        vars(optimizer).update(replaced)
    _REPLACED.attach(optimizer, None)
    if intercept is None:
        return
    original, own = optimizer.apply, vars(optimizer)

    @functools.wraps(original)
    def apply(
        grads: Gradients, trainable_variables: Sequence[keras.Variable] | None = None, **keywords: object
    ) -> None:
        plain = functools.partial(original, **keywords)
        _apply(_PATCH.value, lambda _, *arguments: intercept(plain, *arguments), optimizer, grads, trainable_variables)

    _REPLACED.attach(optimizer, {"apply": own["apply"]} if "apply" in own else {})
    replace_methods(optimizer, apply=apply)


def capturing_applies(handler: Handler) -> contextlib.AbstractContextManager[object]:
    """Context in which a handler gets this thread's calls of `apply`. Calls within the handler update."""
    return _PATCH.open((_PATCH.value or _Handlers())._replace(handler=handler))


def noticing_applies(notice: Callable[[keras.optimizers.Optimizer], None]) -> contextlib.AbstractContextManager[object]:
    """Context that calls `notice(optimizer)` before any optimizer on this thread applies an update."""
    handlers = _PATCH.value or _Handlers()
    return _PATCH.open(handlers._replace(notices=(*handlers.notices, notice)))


def install_transform(
    optimizer: keras.optimizers.Optimizer, transform: Transform | None, *, shown: bool = False
) -> None:
    """Makes the innermost optimizer's `apply` run the *transform* stage; with `shown`, also observe and watch updates.

    The stage runs once per update: at the end of a window, and not if a loss scale skips the update. Refuses an
    optimizer that accumulates gradients itself.
    """
    steps = accumulation_steps(optimizer)
    if transform is not None and steps > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps={steps}), so the gradient of "
            "a whole update can't be transformed. Remove that argument, and compile with "
            f"AccumulatingOptimizer(optimizer, steps={steps})."
        )
    _TRANSFORM.attach(optimizer, transform)
    intercept_apply(optimizer, functools.partial(_update, optimizer) if shown or transform is not None else None)


def installed_transform(optimizer: keras.optimizers.Optimizer) -> Transform | None:
    """The installed transform. Functions that were traced with another transform are outdated."""
    return _TRANSFORM.of(optimizer)


def _update(
    optimizer: keras.optimizers.Optimizer,
    apply: PlainApply,
    grads: Gradients,
    variables: Sequence[keras.Variable] | None,
) -> None:
    """Observes, transforms, applies and watches an update."""
    gradients, variables = list(grads), None if variables is None else list(variables)
    observation, watch = patch_of(optimizer, Observation), patch_of(optimizer, UpdateWatch)
    if observation is not None:
        observation.observe_update(gradients)
    if watch is not None:
        watch.begin(variables)
    transform = installed_transform(optimizer)
    if transform is not None:
        gradients = _transform(optimizer, transform, gradients, variables)
    apply(gradients, variables)
    if watch is not None:
        watch.end()


def _transform(
    optimizer: keras.optimizers.Optimizer,
    transform: Transform,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable] | None,
) -> list[GradientTensor | None]:
    """Transforms `grads`, made whole, dense and unscaled. Returns the results scaled and sharded as `grads` were."""
    updated: Sequence[keras.Variable] = optimizer._trainable_variables if variables is None else variables
    # Variables that are overwritten by their "gradient", such as Float8 scales, are left out.
    indices = [
        index
        for index, (gradient, variable) in enumerate(zip(grads, updated, strict=True))
        if gradient is not None and not is_overwritten(variable)
    ]
    scale = optimizer.loss_scale_factor
    changed = [updated[index] for index in indices]
    warn_of_summed_rows(optimizer, [grads[index] for index in indices], changed)
    dense = [tf.convert_to_tensor(whole) for whole in gather_gradients([grads[index] for index in indices], changed)]
    unscaled = [gradient / scale for gradient in dense] if scale else dense
    whole = transform(unscaled, changed)
    # Clipping by norm gets the norms of these gradients, not of the shards that the optimizer applies.
    replace_norms(optimizer, whole, changed)
    transformed = dict(zip(indices, scatter_gradients(whole, changed), strict=True))
    scaled = {index: gradient * scale if scale else gradient for index, gradient in transformed.items()}
    return [scaled.get(index, gradient) for index, gradient in enumerate(grads)]
