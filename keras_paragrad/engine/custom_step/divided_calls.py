"""Intercepts layer calls and `tape.gradient` while a custom `train_step` is traced."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.operations import random_seed
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Structure


def has_rows(leaf: object) -> bool:
    """Whether a leaf of a call's arguments or outputs is a tensor or array with an axis."""
    return isinstance(leaf, (tf.Tensor, np.ndarray)) and not isinstance(leaf, keras.Variable) and len(leaf.shape) > 0


def rows_of_leaf(leaf: Any, first: Any, stop: Any) -> Any:
    """Takes rows of an argument's leaf, with their mask; returns a leaf without rows unchanged."""
    if not has_rows(leaf):
        return leaf
    mask = mask_of(leaf)
    return with_mask(tf.convert_to_tensor(leaf)[first:stop], None if mask is None else mask[first:stop])


class Handler(Protocol):
    """Handles the intercepted calls on this thread. Within them, nothing is intercepted."""

    def call(self, call: Callable[..., Structure], arguments: Any, keywords: Any) -> Any:
        """Handles a call of an outermost layer."""
        ...

    def gradient(self, compute: Callable[[], Any]) -> Any:
        """Handles a call of `tape.gradient`."""
        ...


class _Interception:
    """What is intercepted on a thread.

    Args:
        handler: Gets the calls; `None` within an intercepted call, where nothing is intercepted.
        differentiates: Whether an intercepted `tape.gradient` is running.
    """

    def __init__(self, handler: Handler | None, *, differentiates: bool = False):
        self.handler, self.differentiates = handler, differentiates
        # The number of random operations without a seed that were traced.
        self.draws = 0


def intercepting(handler: Handler) -> contextlib.AbstractContextManager[object]:
    """Context in which a handler gets this thread's calls of layers and of `tape.gradient`.

    TensorFlow's random operations are seeded by their order, and so draw the same numbers on every replica.
    """
    return _PATCH.open(_Interception(handler))


def differentiates() -> bool:
    """Whether this code runs within an intercepted `tape.gradient`."""
    return _PATCH.value is not None and _PATCH.value.differentiates


def _call(
    interception: _Interception, original: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `Layer.__call__`: passes the call to the handler, during which nothing is intercepted."""
    if interception.handler is None:
        return original(layer, *args, **kwargs)
    with _PATCH.open(_Interception(None)):
        return interception.handler.call(functools.partial(original, layer), args, kwargs)


def _gradient(interception: _Interception, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces `tape.gradient`: passes the call to the handler, during which nothing is intercepted."""
    compute = functools.partial(original, *args, **kwargs)
    if interception.handler is None:
        return compute()
    with _PATCH.open(_Interception(None, differentiates=True)):
        return interception.handler.gradient(compute)


def _get_seed(interception: _Interception, original: Callable[..., Any], op_seed: int | None) -> Any:
    """Replaces TensorFlow's `get_seed`: numbers random operations without a seed, to seed them by their order."""
    if op_seed is None and interception.handler is not None:
        interception.draws += 1
        op_seed = interception.draws
    return original(op_seed)


_PATCH = ProcessPatch[_Interception](
    lambda: (
        Replacement(keras.layers.Layer, "__call__", _call),
        Replacement(tf.GradientTape, "gradient", _gradient),
        Replacement(random_seed, "get_seed", _get_seed),
    )
)
