"""The gradients of several variables, reduced, gathered and scattered as each variable's storage says."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.storage.row_gradients import scale_gradient
from keras_paragrad.storage.storage import Whole, storage_of


def reduce_gradients(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], others: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums gradients over the replicas; called on every replica.

    Args:
        gradients: This replica's gradients of whole variables.
        variables: Their variables.
        others: Tensors to sum in the same collective as the gradients of replicated variables.

    Returns:
        The gradients with which this replica updates, and the sums of the other tensors.
    """
    return reduce_replicated_gradients(reduce_divided_gradients(gradients, variables), variables, others)


def reduce_divided_gradients(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], scale: Any = None
) -> list[Any]:
    """Scales and sums the gradients of divided variables, and leaves the others as they are."""
    storages = [storage_of(variable) for variable in variables]
    indices = [index for index, each in enumerate(storages) if each.divided and gradients[index] is not None]
    scaled = [gradients[index] if scale is None else scale_gradient(gradients[index], scale) for index in indices]
    return _replace_by_sums(gradients, scaled, storages, indices)


def reduce_replicated_gradients(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], others: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums the gradients of replicated variables, and other tensors, and leaves other gradients as they are."""
    storages = [*map(storage_of, variables), *(Whole(None) for _ in others)]
    indices = [index for index, each in enumerate(storages) if not each.divided]
    tensors = [*gradients, *others]
    sums = _replace_by_sums(tensors, [tensors[index] for index in indices], storages, indices)
    return sums[: len(gradients)], sums[len(gradients) :]


def _replace_by_sums(
    gradients: Sequence[Any], scaled: Sequence[Any], storages: Sequence[Any], indices: Sequence[int]
) -> list[Any]:
    """Replaces gradients at some indices by sums over replicas, in one exchange for each class of storage."""
    results, by_reduction = list(gradients), {}
    for index, gradient in zip(indices, scaled, strict=True):
        by_reduction.setdefault(storages[index].reduce, []).append((index, gradient))
    for reduce, pairs in by_reduction.items():
        sums = reduce([gradient for _, gradient in pairs], [storages[index] for index, _ in pairs])
        for (index, _), total in zip(pairs, sums, strict=True):
            results[index] = total
    return results


def gather_gradients(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """The whole gradients from reduced ones; called on every replica."""
    return [
        None if gradient is None else storage_of(variable).gather(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def scatter_gradients(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """This replica's parts of whole gradients, to update with."""
    return [
        None if gradient is None else storage_of(variable).scatter(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
