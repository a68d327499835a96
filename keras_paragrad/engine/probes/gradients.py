"""Gradients of made-up rows with respect to a model's weights, and whether two of them are alike."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

# The most elements of a weight of which the gradient is compared.
_MOST = 2**25
_RELATIVE, _OF_ALL, _COARSE = 1e-3, 1e-5, 3e-2


@contextlib.contextmanager
def watched(model: Any) -> Iterator[Callable[[tf.Tensor], list[tf.Tensor]]]:
    """Context in which a stateless scope's values of the trainable weights are watched; yields gradients of a number.

    Weights that it does not depend on are left out, as very large ones are.
    """
    weights = [weight.value for weight in model.trainable_variables if np.prod(weight.shape) <= _MOST]
    tape = tf.GradientTape(watch_accessed_variables=False)

    def gradients_of(target: tf.Tensor) -> list[tf.Tensor]:
        found = [gradient for gradient in tape.gradient(target, weights) if gradient is not None]
        return [tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in found]

    with tape:
        tape.watch(weights)
        yield gradients_of


def alike(one: list[Any], other: list[Any], *, coarse: bool) -> bool:
    """Whether two gradients differ by no more than rounding.

    Args:
        one, other: Tensors, one for each weight.
        coarse: Whether they were computed in half precision.
    """
    pairs = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(one, other, strict=True)]
    largest = [np.abs(np.concatenate([a.ravel(), b.ravel()])).max(initial=0) for a, b in pairs]
    of_all = max(largest, default=0)
    if coarse:
        return all(np.allclose(a, b, rtol=0, atol=_COARSE * of_all, equal_nan=True) for a, b in pairs)
    # Gradients that are zero but for rounding, as those of biases of keys are, differ from themselves.
    return all(
        np.allclose(a, b, rtol=0, atol=_RELATIVE * size + _OF_ALL * of_all, equal_nan=True)
        for (a, b), size in zip(pairs, largest, strict=True)
    )
