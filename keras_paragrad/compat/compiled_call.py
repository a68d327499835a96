"""Layer calls that XLA compiles one by one, where collectives between layers keep it from compiling the whole pass."""

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import copy_mask, dense_parts, mask_of, pack_dense_parts
from keras_paragrad.compat.types import Structure


class _CompileByLayer(threading.local):
    """Whether layers of this thread's replica are compiled one by one."""

    enabled = False


_COMPILE = _CompileByLayer()


@contextlib.contextmanager
def compile_by_layer(enabled: bool = True) -> Generator[None]:
    """Context in which XLA compiles each layer of this replica that gathers weights."""
    before = _COMPILE.enabled
    _COMPILE.enabled = enabled
    try:
        yield
    finally:
        _COMPILE.enabled = before


def call_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of nested tensors, compiled by XLA within `compile_by_layer`."""
    if not _COMPILE.enabled:
        return function(*arguments)
    with compile_by_layer(False):
        # TensorFlow copies the attributes of a callable object, and some are its own.
        return tf.function(lambda *given: function(*given), jit_compile=True, autograph=False)(*arguments)


def is_compiled_by_layer(layer: keras.layers.Layer) -> bool:
    """Whether XLA compiles calls of this layer."""
    return _COMPILE.enabled and all(inner.supports_jit for inner in layer._flatten_layers())


def needs_whole_pass(layer: keras.layers.Layer) -> bool:
    """Whether a layer's backward pass has to be of the whole batch that its loss is of."""
    return getattr(layer, "needs_whole_pass", False)


class _AddedLosses:
    """The losses that a layer and its sublayers add after this is created."""

    def __init__(self, layer: keras.layers.Layer):
        self._counts = [(inner, len(inner._losses)) for inner in layer._flatten_layers()]

    @property
    def added(self) -> list[list[tf.Tensor]]:
        """The added losses, by layer."""
        return [inner._losses[count:] for inner, count in self._counts]

    def replace(self, losses: Sequence[list[tf.Tensor]]) -> None:
        """Replaces each layer's added losses, or removes them."""
        for index, (inner, count) in enumerate(self._counts):
            inner._losses[count:] = losses[index] if losses else []


class _UncompilableLoopError(Exception):
    """XLA can't pass the state that a loop's backward pass needs between two functions."""


def compiled_call(
    layer: keras.layers.Layer,
    call: Callable[..., Structure],
    arguments: tuple[Structure, ...],
    keywords: dict[str, Any],
    weights: tuple[Mapping[int, tf.Tensor], Mapping[int, tf.Tensor]],
    reading: Callable[..., contextlib.AbstractContextManager[None]],
) -> Structure:
    """Calls a layer as a function that XLA compiles; without XLA, if the layer contains a loop.

    The layer reads its gathered weights in the context `reading(*weights)`. `weights` has them by the `id` of the
    variable: in the variables' dtypes, and in the dtype that the layer computes in.
    """
    leaves = keras.tree.flatten((arguments, keywords))
    masks = [mask_of(leaf) for leaf in leaves]
    # Filled in by the trace of `run`: the flattened arguments within the function, and in a list the layer's outputs.
    inner: list[Structure] = []
    outputs: list[Any] = []
    losses = _AddedLosses(layer)

    def run(parts: list[list[tf.Tensor]], masks: list[tf.Tensor | None], weights: list[dict[str, tf.Tensor]]):
        inner[:] = pack_dense_parts(leaves, parts, masks)
        args, kwargs = keras.tree.pack_sequence_as((arguments, keywords), inner)
        with reading(*({int(key): value for key, value in of.items()} for of in weights)):
            outputs[:] = [call(*args, **kwargs)]
        operations = tf.compat.v1.get_default_graph().get_operations()
        if any(operation.type in ("While", "StatelessWhile") for operation in operations):
            raise _UncompilableLoopError
        flat = keras.tree.flatten(outputs[0])
        return [dense_parts(output) for output in flat], [mask_of(output) for output in flat], losses.added

    named_weights = [{str(key): tensor for key, tensor in of.items()} for of in weights]
    try:
        parts, masks, added = call_compiled(run, [dense_parts(leaf) for leaf in leaves], masks, named_weights)
    except _UncompilableLoopError:
        # The abandoned trace has added its losses.
        losses.replace([])
        with reading(*weights):
            return call(*arguments, **keywords)
    losses.replace(added)
    # Attention removes masks from its inputs: remove them from the tensors outside of the function too.
    for leaf, inside in zip(leaves, inner, strict=True):
        if tf.is_tensor(leaf) and mask_of(inside) is None:
            copy_mask(inside, leaf)
    return keras.tree.pack_sequence_as(outputs[0], pack_dense_parts(keras.tree.flatten(outputs[0]), parts, masks))
