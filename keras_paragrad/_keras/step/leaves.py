"""The dense tensors that nested tensors are made of, of which alone gradients are taken."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.layers import mask_of, with_mask


def has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype allows a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def dense_parts(leaf: Any) -> list[tf.Tensor]:
    """The dense tensors that one is made of; none where it is no tensor."""
    return tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []


def rebuilt(leaves: Sequence[Any], parts: Sequence[Sequence[tf.Tensor]]) -> list[Any]:
    """Leaves made of other tensors, each with the mask that hung on it."""

    def remade(leaf, tensors):
        if not tensors:
            return leaf
        made = tf.nest.pack_sequence_as(leaf, list(tensors), expand_composites=True)
        return made if made is leaf else with_mask(made, mask_of(leaf))

    return [remade(*pair) for pair in zip(leaves, parts, strict=True)]
