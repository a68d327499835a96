"""The dense tensors that nested tensors are made of, of which alone gradients are taken."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.layers import mask_of, with_mask


def has_gradient(tensor: tf.Tensor) -> bool:
    """Whether a tensor's dtype allows a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def dense_parts(leaf: Any) -> list[tf.Tensor]:
    """The dense tensors that one is made of; none where it is no tensor."""
    return tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []


def rebuilt(
    leaves: Sequence[Any], parts: Sequence[Sequence[tf.Tensor]], masks: Sequence[Any] | None = None
) -> list[Any]:
    """Leaves made of other tensors, each with the mask that hung on it.

    Args:
        leaves: The leaves.
        parts: What `dense_parts` gives for each, or tensors in place of those.
        masks: The masks that hung on them, if they may hang there no more: attention takes them off its inputs.
    """

    def remade(leaf, tensors, mask):
        if not tensors:
            return leaf
        made = tf.nest.pack_sequence_as(leaf, list(tensors), expand_composites=True)
        return made if made is leaf else with_mask(made, mask)

    hung = map(mask_of, leaves) if masks is None else masks
    return [remade(*each) for each in zip(leaves, parts, hung, strict=True)]
