"""The *combine* stage on several replicas: what becomes of a gradient depends on where its variable lives."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.replicas.collectives import replica_index
from keras_paragrad._keras.replicas.row_gradients import sum_gradients
from keras_paragrad._keras.storage.exchange import all_gather, reduce_scatter
from keras_paragrad._keras.storage.sharded import storage_of


def combined(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], beside: Sequence[tf.Tensor] = ()
) -> tuple[list[Any], list[tf.Tensor]]:
    """Sums gradients over the replicas: an all-reduce for variables that are whole, a reduce-scatter for shards.

    Args:
        gradients: This replica's, of whole variables.
        variables: The variable that each of them belongs to.
        beside: Other tensors to sum over the replicas, in the collective of whole variables' gradients.

    Returns:
        What this replica applies, and the sums of the other tensors.
    """
    found = scattered(gradients, variables)
    whole = [place for place, variable in enumerate(variables) if storage_of(variable) is None]
    summed = sum_gradients([*(gradients[place] for place in whole), *beside])
    for place, value in zip(whole, summed, strict=False):
        found[place] = value
    return found, summed[len(whole) :]


def scattered(gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    """Gradients of which those of variables in shards are reduce-scattered, and the others are left as they are."""
    found: list[Any] = list(gradients)
    storages = {place: storage for place, variable in enumerate(variables) if (storage := storage_of(variable))}
    places = [place for place in storages if gradients[place] is not None]
    sums = reduce_scatter([gradients[place] for place in places], [storages[place].partition for place in places])
    for place, value in zip(places, sums, strict=True):
        found[place] = value
    return found


def whole_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Summed gradients of which those in shards are gathered; called on every replica."""
    storages = [storage_of(variable) for variable in variables]
    return [
        # The identity waits for what this replica waits for.
        storage.partition.whole(all_gather(tf.identity(gradient))) if storage and gradient is not None else gradient
        for gradient, storage in zip(gradients, storages, strict=True)
    ]


def own_parts(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Whole gradients, of which this replica keeps its shards where variables are in shards."""
    storages = [storage_of(variable) for variable in variables]
    return [
        storage.partition.shard(gradient, replica_index()) if storage and gradient is not None else gradient
        for gradient, storage in zip(gradients, storages, strict=True)
    ]


def in_shards(variables: Sequence[Any]) -> bool:
    """Whether any of the variables lives in shards."""
    return any(storage_of(variable) for variable in variables)
