"""Where variables live on the replicas, and so what becomes of their gradients in the *combine* stage."""

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad._keras.replicas.collectives import sum_over_replicas

_LAYOUT = "_keras_paragrad_layout"


class VariableLayout(Protocol):
    """How variables are laid out over the replicas: whole on each of them, in shards, or on a mesh."""

    def combine(self, gradients: Sequence[Any]) -> list[Any]:
        """What a replica applies of the sum of all replicas' gradients; called on every replica.

        Args:
            gradients: This replica's, dense or `tf.IndexedSlices`, of several variables of this layout.
        """
        ...


class Replicated:
    """Every replica holds variables whole, and applies the whole sum: an all-reduce."""

    def combine(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums over all replicas."""
        return sum_over_replicas(gradients)


_REPLICATED = Replicated()


def layout_of(variable: keras.Variable) -> VariableLayout:
    """The layout of a variable; `Replicated`, unless it was given another."""
    return variable.__dict__.get(_LAYOUT, _REPLICATED)


def lay_out(variables: Sequence[keras.Variable], layout: VariableLayout) -> None:
    """States the layout of variables, before a step is traced.

    Args:
        variables: The variables.
        layout: The same object for all that it is to combine together.
    """
    for variable in variables:
        # Bypass `__setattr__`: Keras tracks what is assigned as an attribute.
        variable.__dict__[_LAYOUT] = layout


def combined(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], beside: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Combines gradients over the replicas as the layouts of their variables ask for.

    Args:
        gradients: This replica's.
        variables: The variable that each of them belongs to.
        beside: Other tensors to sum over the replicas, in the collective of replicated variables' gradients.

    Returns:
        What this replica applies, and the sums of the other tensors.
    """
    found: list[Any] = list(gradients)
    places: dict[VariableLayout, list[int]] = {}
    for place, variable in enumerate(variables):
        places.setdefault(layout_of(variable), []).append(place)
    whole = places.pop(_REPLICATED, [])
    summed = _REPLICATED.combine([*(found[place] for place in whole), *beside])
    totals = [(whole, summed[: len(whole)])]
    totals += [(those, layout.combine([found[place] for place in those])) for layout, those in places.items()]
    for those, values in totals:
        for place, value in zip(those, values, strict=True):
            found[place] = value
    return found, summed[len(whole) :]
