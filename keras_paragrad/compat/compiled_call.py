"""Calls of layers that XLA compiles one by one, where collectives between them keep it from compiling the pass."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import copy_mask, dense_parts, mask_of, pack_dense_parts
from keras_paragrad.compat.model import all_layers

# A layer with this attribute looks at the pass as a whole, which is compiled as one then.
_WHOLE = "needs_whole_pass"


class _CompileByLayer(threading.local):
    """Whether this replica's layers are compiled."""

    def __init__(self) -> None:
        self.enabled = False


_COMPILE = _CompileByLayer()


@contextlib.contextmanager
def compile_by_layer(asked: bool = True) -> Iterator[None]:
    """Context of a pass on this replica in which XLA compiles each layer that gathers weights, by itself."""
    before = _COMPILE.enabled
    _COMPILE.enabled = asked
    try:
        yield
    finally:
        _COMPILE.enabled = before


def call_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of nested tensors, as a function that XLA compiles if it compiles layers one by one."""
    if not _COMPILE.enabled:
        return function(*arguments)
    with compile_by_layer(False):
        return tf.function(function, jit_compile=True, autograph=False)(*arguments)


def is_compiled_by_layer(layer: Any) -> bool:
    """Whether a call of this layer is to be compiled."""
    return _COMPILE.enabled and all(each.supports_jit for each in layer._flatten_layers())


def can_compile_by_layer(model: keras.Model) -> bool:
    """Whether a model's pass may be compiled in pieces."""
    return not any(getattr(layer, _WHOLE, False) for layer in all_layers(model))


class _AddedLosses:
    """The losses that a layer, and those in it, add from now on."""

    def __init__(self, layer: Any):
        self._places = [(each, len(each._losses)) for each in layer._flatten_layers()]

    @property
    def added(self) -> list[list[tf.Tensor]]:
        """By layer."""
        return [each._losses[count:] for each, count in self._places]

    def replace(self, losses: Sequence[list[tf.Tensor]]) -> None:
        """Puts others in their place, by layer, or none."""
        for place, (each, count) in enumerate(self._places):
            each._losses[count:] = losses[place] if losses else []


class _UncompilableLoopError(Exception):
    """XLA can't keep what a loop's backward pass needs of it from one function to another."""


def compiled_call(
    layer: Any,
    call: Callable[..., Any],
    arguments: tuple,
    keywords: dict[str, Any],
    weights: tuple[Mapping[int, tf.Tensor], Mapping[int, tf.Tensor]],
    reading: Callable[..., contextlib.AbstractContextManager[None]],
) -> Any:
    """Calls a layer as a function that XLA compiles.

    Args:
        layer: The layer, for the losses that it adds.
        call: Its call.
        arguments: Of the call.
        keywords: Of the call.
        weights: Gathered ones, as `reading` takes them.
        reading: Makes the context in which the layer reads them.
    """
    leaves = keras.tree.flatten((arguments, keywords))
    masks = [mask_of(leaf) for leaf in leaves]
    inner: list[Any] = []
    outputs: list[Any] = []
    losses = _AddedLosses(layer)

    def run(parts, masks, weights):
        inner[:] = pack_dense_parts(leaves, parts, masks)
        given, named = keras.tree.pack_sequence_as((arguments, keywords), inner)
        with reading(*({int(key): each for key, each in of.items()} for of in weights)):
            outputs[:] = [call(*given, **named)]
        made = tf.compat.v1.get_default_graph().get_operations()
        if any(each.type in ("While", "StatelessWhile") for each in made):
            raise _UncompilableLoopError
        found = keras.tree.flatten(outputs[0])
        return [dense_parts(each) for each in found], [mask_of(each) for each in found], losses.added

    named_weights = [{str(key): tensor for key, tensor in of.items()} for of in weights]
    try:
        parts, masks, added = call_compiled(run, [dense_parts(leaf) for leaf in leaves], masks, named_weights)
    except _UncompilableLoopError:
        losses.replace([])
        with reading(*weights):
            return call(*arguments, **keywords)
    losses.replace(added)
    # Attention takes masks off its inputs.
    for leaf, inside in zip(leaves, inner, strict=True):
        if tf.is_tensor(leaf) and mask_of(inside) is None:
            copy_mask(inside, leaf)
    return keras.tree.pack_sequence_as(outputs[0], pack_dense_parts(keras.tree.flatten(outputs[0]), parts, masks))
