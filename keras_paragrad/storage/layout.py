"""What becomes of the gradients of several variables, each of which depends on where its variable lives."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.storage.row_gradients import scaled_gradient
from keras_paragrad.storage.storage import Whole, storage_of


def divided(variables: Sequence[keras.Variable]) -> bool:
    """Whether each replica holds a part of any of the variables."""
    return any(storage_of(variable).divided for variable in variables)


def reduced(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], beside: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums gradients over the replicas; called on every replica.

    Args:
        gradients: This replica's, of whole variables.
        variables: The variable that each of them belongs to.
        beside: Other tensors to sum over the replicas, in the collective of replicated variables' gradients.

    Returns:
        What this replica applies, and the sums of the other tensors.
    """
    return reduced_replicated(reduced_divided(gradients, variables), variables, beside)


def reduced_divided(gradients: Sequence[Any], variables: Sequence[keras.Variable], scale: Any = None) -> list[Any]:
    """Gradients, times a scale if that is given, of which those of divided variables alone are scaled and summed."""
    storages = [storage_of(variable) for variable in variables]
    places = [index for index, each in enumerate(storages) if each.divided and gradients[index] is not None]
    scaled = [gradients[index] if scale is None else scaled_gradient(gradients[index], scale) for index in places]
    return _replaced_by_sums(gradients, scaled, storages, places)


def reduced_replicated(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], beside: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Gradients of which those of replicated variables alone are summed, with other tensors."""
    # Tensors have no part anywhere, as replicated variables.
    storages = [*map(storage_of, variables), *(Whole(None) for _ in beside)]
    places = [index for index, each in enumerate(storages) if not each.divided]
    everything = [*gradients, *beside]
    sums = _replaced_by_sums(everything, [everything[index] for index in places], storages, places)
    return sums[: len(gradients)], sums[len(gradients) :]


def _replaced_by_sums(
    gradients: Sequence[Any], scaled: Sequence[Any], storages: Sequence[Any], places: Sequence[int]
) -> list[Any]:
    """Gradients with those at some places replaced by sums over replicas, in one exchange for each class of storage."""
    results, by_reduction = list(gradients), {}
    for place, gradient in zip(places, scaled, strict=True):
        by_reduction.setdefault(storages[place].reduce, []).append((place, gradient))
    for reduce, pairs in by_reduction.items():
        sums = reduce([gradient for _, gradient in pairs], [storages[place] for place, _ in pairs])
        for (place, _), total in zip(pairs, sums, strict=True):
            results[place] = total
    return results


def whole_gradients(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """The whole of reduced gradients; called on every replica."""
    return [
        None if gradient is None else storage_of(variable).gather(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def own_parts(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """What this replica updates with, of whole gradients."""
    return [
        None if gradient is None else storage_of(variable).scatter(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def mesh_of(variables: Sequence[keras.Variable]) -> Any:
    """The mesh that functions have to run on which compute with variables, or `None`."""
    return next((mesh for each in variables if (mesh := storage_of(each).mesh) is not None), None)


def computing_with(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[Any]:
    """The context in which functions run that compute with variables."""
    storages = map(storage_of, variables)
    return next((each.computing() for each in storages if each.mesh is not None), contextlib.nullcontext())
