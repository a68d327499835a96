"""Computes the statistics of synchronized `BatchNormalization` over the examples of all replicas.

Keras counts the row that fills an empty replica batch, and doesn't synchronize statistics of masked inputs.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.engine.trials.trial import is_trial


class _Rows(NamedTuple):
    """Whether a replica's rows are examples rather than filler; `None` if they always are."""

    nonempty: tf.Tensor | bool | None


def counting_examples(nonempty: tf.Tensor | bool | None) -> contextlib.AbstractContextManager[object]:
    """Context in which a replica's step is traced. Its rows are examples if `nonempty` is true or `None`."""
    return _PATCH.open(_Rows(nonempty))


def _moments(
    rows: _Rows,
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces `BatchNormalization._moments`, which is `original`: the mean and variance of a batch, `(channels,)`."""
    averages_rows = 0 in _reduction_axes(layer, inputs)
    # In a trial, on made-up rows, there are no other replicas.
    if not (layer.synchronized and averages_rows) or replica_count() == 1 or is_trial():
        return original(layer, inputs, mask)
    if mask is not None:
        return _masked_moments(layer, inputs, mask, rows.nonempty)
    if rows.nonempty is not None:
        # Drop the filler.
        inputs = inputs[: tf.where(rows.nonempty, tf.shape(inputs)[0], 0)]
    return original(layer, inputs, None)


def _reduction_axes(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> list[int]:
    """The axes to average over: all but the channels."""
    axes = list(range(len(inputs.shape)))
    del axes[layer.axis]
    return axes


def _masked_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor, nonempty: tf.Tensor | bool | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keras's moments of masked inputs, with sums over all replicas."""
    context, axes = tf.distribute.get_replica_context(), _reduction_axes(layer, inputs)
    counted = tf.broadcast_to(tf.expand_dims(tf.cast(mask, "bool"), -1), tf.shape(inputs))
    if nonempty is not None:
        counted = tf.logical_and(counted, nonempty)

    def total(values: tf.Tensor) -> tf.Tensor:
        local = tf.reduce_sum(tf.where(counted, values, tf.zeros_like(values)), axes, keepdims=True)
        # Unlike this package's collectives, it has a gradient.
        return context.all_reduce(tf.distribute.ReduceOp.SUM, local)

    count = total(tf.ones_like(inputs)) + keras.backend.epsilon()
    mean = total(inputs) / count
    variance = total(tf.square(inputs - mean)) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _replacements() -> list[Replacement]:
    function: Any = _moments
    return [Replacement(keras.layers.BatchNormalization, "_moments", function)]


_PATCH = ProcessPatch[_Rows](_replacements)
