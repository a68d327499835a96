"""Intercepts what a step calls on this thread: layers, `tape.gradient`, and random operations."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.operations import random_seed
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.calls.sources import differentiating
from keras_paragrad.engine.losses.dividers import IndivisibleError


class Handler(Protocol):
    """Gets the outermost calls of layers. Within the handler, nothing is intercepted."""

    def __call__(self, call: Callable[..., Structure], layer: keras.layers.Layer, arguments: Any, keywords: Any) -> Any:
        """Returns the result of `call`. `NotImplemented` enters the layer: the handler gets the calls within it."""
        ...


class _Interception:
    """A thread's handler, `None` within a divided call; `draws` counts random operations without a seed."""

    def __init__(self, handler: Handler | None):
        self.handler, self.draws = handler, 0


def intercepting(handler: Handler) -> contextlib.AbstractContextManager[object]:
    """Context in which a handler gets this thread's calls of layers.

    TensorFlow's random operations are seeded by their order, and so draw the same numbers on every replica.
    """
    return _PATCH.open(_Interception(handler))


def not_intercepting() -> contextlib.AbstractContextManager[object]:
    """Context of a divided call, within which layers are called as they are."""
    return _PATCH.open(_Interception(None))


def _call(
    interception: _Interception, original: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `Layer.__call__`. If the handler returns `NotImplemented`, it gets the calls within the layer."""
    handler = interception.handler
    if handler is None or any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs))):
        return original(layer, *args, **kwargs)
    with not_intercepting():
        result = handler(functools.partial(original, layer), layer, args, kwargs)
    return original(layer, *args, **kwargs) if result is NotImplemented else result


def _gradient(
    interception: _Interception,
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `tape.gradient`, so that divided calls compute only what it asks for."""
    with differentiating(sources):
        return original(tape, target, sources, *args, **kwargs)


def _get_seed(interception: _Interception, original: Callable[..., Any], op_seed: int | None) -> Any:
    """Replaces TensorFlow's `get_seed`. A random operation without a seed gets its number in the step as its seed."""
    if op_seed is None and interception.handler is not None:
        interception.draws += 1
        op_seed = interception.draws
    return original(op_seed)


def _draw(interception: _Interception, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces methods of `tf.random.Generator`: refuses them on replicas, each of which would draw other numbers."""
    if interception.handler is not None and replica_count() > 1:
        raise IndivisibleError(
            "A step on the whole batch draws from a tf.random.Generator, which draws other numbers on each replica. "
            "Draw with keras.random, with a keras.random.SeedGenerator that is an attribute of the model."
        )
    return original(*args, **kwargs)


_PATCH = ProcessPatch[_Interception](
    lambda: (
        Replacement(keras.layers.Layer, "__call__", _call),
        Replacement(tf.GradientTape, "gradient", _gradient),
        Replacement(random_seed, "get_seed", _get_seed),
        # Every method that draws calls `skip`, except `binomial`.
        Replacement(tf.random.Generator, "skip", _draw),
        Replacement(tf.random.Generator, "binomial", _draw),
    )
)
