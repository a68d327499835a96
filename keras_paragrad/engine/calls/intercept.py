"""Intercepts calls in a step, of layers, `tape.gradient` and random numbers, on the thread that traces or runs it."""

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
    """Gets the outermost calls of layers; within an answer of its own, nothing is intercepted."""

    def __call__(self, call: Callable[..., Structure], layer: keras.layers.Layer, arguments: Any, keywords: Any) -> Any:
        """Calls a layer in place of `call`, or returns `NotImplemented` for a layer that is to be entered."""
        ...


class _Interception:
    """The handler of a thread, or `None` within a call; and the number of random operations without a seed so far."""

    def __init__(self, handler: Handler | None):
        self.handler, self.draws = handler, 0


def intercepting(handler: Handler) -> contextlib.AbstractContextManager[object]:
    """Context in which a handler gets this thread's calls of layers.

    TensorFlow's random operations are seeded by their order, and so draw the same numbers on every replica.
    """
    return _PATCH.open(_Interception(handler))


def not_intercepting() -> contextlib.AbstractContextManager[object]:
    """Context of a call that is divided: the calls within it are made as they are."""
    return _PATCH.open(_Interception(None))


def _call(
    interception: _Interception, original: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any
) -> Any:
    """Replaces `Layer.__call__`. A layer that the handler doesn't divide is entered: calls within it are divided."""
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
    """Replaces TensorFlow's `get_seed`: numbers random operations without a seed, to seed them by their order."""
    if op_seed is None and interception.handler is not None:
        interception.draws += 1
        op_seed = interception.draws
    return original(op_seed)


def _draw(interception: _Interception, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces what draws from a `tf.random.Generator`: refuses numbers that differ between replicas for one batch."""
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
