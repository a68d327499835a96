"""A checksum of the batches that deterministic training has read, in their order.

Deterministic training computes each batch in a fixed number of parts. A batch's checksum is a sum over its parts, so it
doesn't depend on the replicas that read them.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.optimizer import innermost_optimizer
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.variables import SavedVariables

# Odd numbers whose bits are mixed, as in the finalizer of MurmurHash3.
_MULTIPLIERS = (-49064778989728563, -4265267296055464877)
_SHIFT = 31
# The modulus of the checksum, and as a mask, the lowest 31 bits.
_PRIME = 2**31 - 1
_ATTRIBUTE = "data_order"


class DataOrder(SavedVariables):
    """The checksum, saved with the optimizer: two numbers below 2**31, which replicas add without rounding."""

    def __init__(self):
        super().__init__()
        self.state = self.add(_ATTRIBUTE, (2,), "int64")

    @classmethod
    def of(cls, model: keras.Model) -> "DataOrder | None":
        """The checksum of a model in deterministic training."""
        return vars(model.optimizer).get(_ATTRIBUTE) if model.optimizer is not None else None

    def after(self, batch: tf.Tensor) -> tf.Tensor:
        """The checksum after another batch, given the sum of `checksum_of_part` over its parts."""
        return tf.math.floormod(tf.convert_to_tensor(self.state.value) * 48271 + batch, _PRIME)


def follow_data_order(model: keras.Model, before: Any, *, follow: bool) -> keras.optimizers.Optimizer | None:
    """Attaches a `DataOrder` to a model's optimizer if `follow`. Returns that optimizer, or `None`.

    `before` is what the last call returned. If the two optimizers share an inner one, the checksum moves to the new
    optimizer; if not, it is dropped.
    """
    optimizer = model.optimizer if follow and model.compiled else None
    kept = None
    if before is not None and before is not optimizer:
        kept = vars(before)[_ATTRIBUTE]
        delattr(before, _ATTRIBUTE)
    if optimizer is not None and DataOrder.of(model) is None:
        alike = kept is not None and innermost_optimizer(before) is innermost_optimizer(optimizer)
        with tf.init_scope(), model.distribute_strategy.scope():
            setattr(optimizer, _ATTRIBUTE, kept if alike else DataOrder())
    return optimizer


def checksum_of_part(data: Batch, number: tf.Tensor) -> tf.Tensor:
    """Hashes a part's values, their positions and the part's number in the batch to two int64 numbers."""
    total = tf.zeros([], tf.int64)
    present = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
    for index, leaf in enumerate(present):
        values = _as_integers(leaf)
        positions = tf.range(1, tf.size(values, tf.int64) + 1, dtype=tf.int64) * (2 * index + 1)
        total += tf.reduce_sum(_mixed(values) * _mixed(positions))
    mixed = _mixed(total + tf.cast(number, tf.int64))
    mask = tf.constant(_PRIME, tf.int64)
    return tf.stack([tf.bitwise.bitwise_and(mixed, mask), tf.bitwise.bitwise_and(_shifted(mixed), mask)])


def _as_integers(leaf: Any) -> tf.Tensor:
    """The bits of a tensor's values, as a flat int64 tensor."""
    if leaf.dtype == tf.string:
        return tf.reshape(tf.strings.to_hash_bucket_fast(leaf, 2**62), [-1])
    if leaf.dtype.is_floating or leaf.dtype.is_complex:
        leaf = tf.bitcast(leaf, {2: tf.int16, 4: tf.int32, 8: tf.int64}.get(leaf.dtype.size, tf.int8))
    return tf.reshape(tf.cast(leaf, tf.int64), [-1])


def _mixed(values: tf.Tensor) -> tf.Tensor:
    """Mixes the bits of integers, modulo 2**64: each output bit depends on all input bits."""
    for multiplier in _MULTIPLIERS:
        values = tf.bitwise.bitwise_xor(values, _shifted(values)) * multiplier
    return values


def _shifted(values: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(values, tf.constant(_SHIFT, tf.int64))
