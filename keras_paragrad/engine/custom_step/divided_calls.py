"""Intercepts, while a model's own `train_step` is traced, the calls of its layers and its gradients."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import random_seed

from keras_paragrad.compat.types import Structure

_GRADIENT, _CALL, _SEED = "gradient", "__call__", "get_seed"


def has_rows(leaf: object) -> bool:
    """Whether a leaf of a call's arguments or outputs is a tensor or array that is no number."""
    return isinstance(leaf, (tf.Tensor, np.ndarray)) and not isinstance(leaf, keras.Variable) and len(leaf.shape) > 0


class Handler(Protocol):
    """What happens in place of the intercepted calls on this thread. Within them, nothing is intercepted."""

    def call(self, layer: keras.layers.Layer, call: Callable[..., Structure], arguments: Any, keywords: Any) -> Any:
        """Calls a layer that no other layer calls."""
        ...

    def gradient(self, compute: Callable[[], Any]) -> Any:
        """Computes what `tape.gradient` returns."""
        ...


class _Interception(threading.local):
    """What a thread intercepts: each replica is traced in its own."""

    handler: Handler | None = None
    # How many random operations without a seed were traced.
    draws: int | None = None
    # Whether `tape.gradient` computes.
    differentiates = False


_local = _Interception()
_lock = threading.Lock()
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
_contexts = 0


@contextlib.contextmanager
def intercepting(handler: Handler) -> Generator[None]:
    """Context in which this thread's calls of layers and `tape.gradient` go to a handler.

    TensorFlow's random operations get seeds by their number, and so draw the same on every replica.
    """
    before = _local.handler, _local.draws
    _count_contexts(1)
    _local.handler, _local.draws = handler, 0
    try:
        yield
    finally:
        _local.handler, _local.draws = before
        _count_contexts(-1)


def differentiates() -> bool:
    """Whether this code runs within an intercepted `tape.gradient`."""
    return _local.differentiates


@contextlib.contextmanager
def _suspended(*, differentiates: bool) -> Generator[None]:
    """Context in which nothing is intercepted, and random operations are TensorFlow's."""
    before = _local.handler, _local.draws, _local.differentiates
    _local.handler, _local.draws, _local.differentiates = None, None, differentiates
    try:
        yield
    finally:
        _local.handler, _local.draws, _local.differentiates = before


def _count_contexts(change: int) -> None:
    global _contexts
    with _lock:
        if not _contexts:
            for owner, name, make in _REPLACED:
                _originals[owner, name] = original = getattr(owner, name)
                setattr(owner, name, make(original))
        _contexts += change
        if not _contexts:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> Any:
        handler = _local.handler
        if handler is None:
            return original(layer, *arguments, **keywords)
        with _suspended(differentiates=False):
            return handler.call(layer, functools.partial(original, layer), arguments, keywords)

    return call


def _differentiating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradient(tape: tf.GradientTape, *arguments: Any, **keywords: Any) -> Any:
        compute = functools.partial(original, tape, *arguments, **keywords)
        handler = _local.handler
        if handler is None:
            return compute()
        with _suspended(differentiates=True):
            return handler.gradient(compute)

    return gradient


def _seeding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_seed(op_seed: int | None) -> Any:
        if op_seed is None and _local.draws is not None:
            _local.draws += 1
            op_seed = _local.draws
        return original(op_seed)

    return get_seed


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (keras.layers.Layer, _CALL, _calling),
    (tf.GradientTape, _GRADIENT, _differentiating),
    (random_seed, _SEED, _seeding),
)
