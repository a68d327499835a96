"""The *transform* stage: the gradient of a whole update, changed once on its way to the optimizer."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.capabilities import accumulation_steps
from keras_paragrad._keras.objects.state import state_of
from keras_paragrad._keras.storage.layout import own_parts, whole_gradients
from keras_paragrad._keras.storage.updating import measure_again

# In files, the state of a transform is that of an attribute of the optimizer, numbered in their order.
_STATE = "gradient_transform_"


class Transform(Protocol):
    """Fills the *transform* stage.

    With an attribute `outside_xla` that is true, XLA compiles the forward and backward pass alone.
    """

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> Sequence[tf.Tensor]:
        """Returns what the optimizer is to clip and apply instead of `gradients`.

        It is called while a step is traced, on every replica, and must return the same on each.

        Args:
            gradients: Dense, of all replicas and micro-batches of the update, without loss scale, before clipping.
            variables: The weights that they belong to: all that have a gradient.
        """
        ...


class Chain(NamedTuple):
    """Transforms that are applied one after the other."""

    transforms: tuple[Transform, ...]

    @property
    def outside_xla(self) -> bool:
        """Whether one of them is not to be compiled by XLA."""
        return any(getattr(each, "outside_xla", False) for each in self.transforms)

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> Sequence[tf.Tensor]:
        """What the last one returns."""
        for transform in self.transforms:
            gradients = list(transform(gradients, variables))
        return gradients


def save_states(optimizer: Any, transforms: Sequence[Any]) -> None:
    """Has the outermost optimizer save the `state` of each transform that has one, and no other, with its own."""
    states = {f"{_STATE}{place}": each.state for place, each in enumerate(transforms) if each.state is not None}
    for name in [name for name in vars(optimizer) if name.startswith(_STATE)]:
        if states.get(name) is not getattr(optimizer, name):
            delattr(optimizer, name)
    for name, state in states.items():
        if name not in vars(optimizer):
            setattr(optimizer, name, state)


def install(optimizer: Any, transform: Transform | None) -> None:
    """Makes an optimizer apply transformed gradients from now on, or those it is given, if `None`.

    Args:
        optimizer: The innermost, which is given the gradient of a whole update.
        transform: The stage's filler.

    Raises:
        ValueError: The optimizer accumulates gradients itself.
    """
    if transform is None:
        if installed(optimizer) is not None:
            state_of(optimizer).transform = None
            del optimizer.__dict__["apply"]
        return
    steps = accumulation_steps(optimizer)
    if steps > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps={steps}), so the gradient of "
            "a whole update can't be transformed. Remove that argument, and compile with "
            f"AccumulatingOptimizer(optimizer, steps={steps})."
        )
    state_of(optimizer).transform = transform
    # Bypass `__setattr__`: Keras tracks and saves what is assigned as an attribute.
    optimizer.__dict__["apply"] = functools.partial(_apply, optimizer, transform)


def installed(optimizer: Any) -> Transform | None:
    """What the gradients of an optimizer's updates pass through. Functions traced with another one are outdated."""
    return state_of(optimizer).transform


def _apply(optimizer: Any, transform: Transform, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    grads, given = list(grads), None if trainable_variables is None else list(trainable_variables)
    variables = optimizer._trainable_variables if given is None else given
    # Float8 scales travel as gradients, and are none.
    places = [
        place
        for place, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if gradient is not None and not optimizer._overwrite_variable_with_gradient(variable)
    ]
    scale = optimizer.loss_scale_factor
    changed = [variables[place] for place in places]
    dense = whole_gradients([tf.convert_to_tensor(grads[place]) for place in places], changed)
    unscaled = [gradient / scale for gradient in dense] if scale else dense
    whole = transform(unscaled, changed)
    measure_again(optimizer, whole, changed)
    transformed = own_parts(whole, changed)
    for place, gradient in zip(places, transformed, strict=True):
        grads[place] = gradient * scale if scale else gradient
    type(optimizer).apply(optimizer, grads, given)
