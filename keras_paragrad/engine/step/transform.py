"""The *transform* stage: the gradient of a whole update, changed once on its way to the optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

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
