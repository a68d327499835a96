"""The last stages of a step: the gradient of an update, *observed*, *transformed* and *applied*."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.capabilities import accumulation_steps
from keras_paragrad.compat.method_patch import patch_of, replace_methods, restore_methods
from keras_paragrad.compat.state import state_of
from keras_paragrad.engine.step.transform import Transform
from keras_paragrad.engine.telemetry.observe import Observation
from keras_paragrad.engine.telemetry.watch import Watch
from keras_paragrad.storage.gradients import gather_gradients, scatter_gradients
from keras_paragrad.storage.updating import replace_norms

# Takes the `apply` that it stands in for, and what that one takes.
Apply = Callable[[Callable[..., None], Sequence[Any], Sequence[Any] | None], None]


def intercept(optimizer: Any, apply: Apply | None) -> None:
    """Has `apply` called in place of an optimizer's own, or no longer, if `None`. Nothing else replaces it."""
    state = state_of(optimizer)
    if state.intercepted is not None:
        restore_methods(optimizer, "apply")
        replace_methods(optimizer, **state.intercepted)
        state.intercepted = None
    if apply is not None:
        before = optimizer.apply
        # One that was assigned to this optimizer alone is put back.
        state.intercepted = {"apply": before} if "apply" in vars(optimizer) else {}
        replace_methods(
            optimizer, apply=lambda grads, trainable_variables=None: apply(before, grads, trainable_variables)
        )


def install(optimizer: Any, transform: Transform | None, *, shown: bool = False) -> None:
    """Makes an optimizer's `apply` run the last stages of a step, while one is filled.

    They run in the optimizer because it decides on updates: at the end of a window, and unless a loss scale skips one.

    Args:
        optimizer: The innermost, which gets the gradient of a whole update.
        transform: Fills the *transform* stage.
        shown: Whether the *observe* or *telemetry* stage is filled.

    Raises:
        ValueError: There is a transform, and the optimizer accumulates gradients itself.
    """
    steps = accumulation_steps(optimizer)
    if transform is not None and steps > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps={steps}), so the gradient of "
            "a whole update can't be transformed. Remove that argument, and compile with "
            f"AccumulatingOptimizer(optimizer, steps={steps})."
        )
    state_of(optimizer).transform = transform
    intercept(optimizer, functools.partial(_update, optimizer) if shown or transform is not None else None)


def installed(optimizer: Any) -> Transform | None:
    """The transform of an optimizer's updates. Functions that were traced with another one are outdated."""
    return state_of(optimizer).transform


def _update(optimizer: Any, apply: Callable, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
    gradients, given = list(grads), None if trainable_variables is None else list(trainable_variables)
    observation, watch = patch_of(optimizer, Observation), patch_of(optimizer, Watch)
    if observation is not None:
        observation.show(gradients)
    if watch is not None:
        watch.begin(given)
    transform = installed(optimizer)
    if transform is not None:
        gradients = _transformed(optimizer, transform, gradients, given)
    apply(gradients, given)
    if watch is not None:
        watch.end()


def _transformed(optimizer: Any, transform: Transform, grads: list[Any], given: Sequence[Any] | None) -> list[Any]:
    variables = optimizer._trainable_variables if given is None else given
    # Float8 scales travel as gradients, and are none.
    places = [
        place
        for place, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if gradient is not None and not optimizer._overwrite_variable_with_gradient(variable)
    ]
    scale = optimizer.loss_scale_factor
    changed = [variables[place] for place in places]
    dense = gather_gradients([tf.convert_to_tensor(grads[place]) for place in places], changed)
    unscaled = [gradient / scale for gradient in dense] if scale else dense
    whole = transform(unscaled, changed)
    replace_norms(optimizer, whole, changed)
    transformed = dict(zip(places, scatter_gradients(whole, changed), strict=True))
    scaled = {place: gradient * scale if scale else gradient for place, gradient in transformed.items()}
    return [scaled.get(place, gradient) for place, gradient in enumerate(grads)]
