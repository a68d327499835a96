"""Pins tensors between layers, that is, divides them by rows only: DTensor's own layouts are sometimes wrong."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import children, copy_mask, override_attributes
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.private import in_symbolic_scope
from keras_paragrad.compat.types import Structure
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout

# DTensor computes these correctly for any layout, so a Dense layer can consume outputs divided by units.
_UNPINNED = (
    keras.layers.Dense,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
)
# Layers in these are not pinned: attention keeps heads divided, and cells compute with whole weights.
_PINNED_AS_A_WHOLE = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, keras.layers.RNN)


class TracedRows(threading.local):
    """The number of rows in the batch for which this thread traces a step, and the mesh axis that divides them."""

    count: int = 0
    axis: str | None = None


ROWS = TracedRows()


@contextlib.contextmanager
def pinning_between_layers(model: keras.Model) -> Generator[None]:
    """Context in which the inputs and outputs of layers are divided only by rows.

    With layouts that it chooses, DTensor computes some operations wrong, such as a concatenation along a divided
    dimension or a reshape that splits one.
    """
    layers = all_layers(model)
    inside = {
        id(descendant)
        for layer in layers
        if isinstance(layer, _PINNED_AS_A_WHOLE)
        for descendant in _descendants(layer)
    }
    # For example TimeDistributed, which stacks its layer's outputs.
    wrapped = {id(layer.layer) for layer in layers if isinstance(layer, keras.layers.Wrapper)}
    unpinned = {id(layer) for layer in layers if type(layer) in _UNPINNED} - wrapped
    pinned = [layer for layer in layers if id(layer) not in inside | unpinned and not isinstance(layer, keras.Model)]
    with contextlib.ExitStack() as stack:
        for layer in [model, *pinned]:
            stack.enter_context(override_attributes(layer, call=_pin_call(layer.call)))
        yield


def _descendants(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for child in children(layer):
        yield child
        yield from _descendants(child)


def _pin_call(call: Callable[..., Structure]) -> Callable[..., Structure]:
    """Wraps a layer's `call` so that its inputs and outputs are pinned."""

    @functools.wraps(call)
    def pinned(*arguments: Any, **keywords: Any) -> Structure:
        if in_symbolic_scope() or not computing_on_mesh():
            return call(*arguments, **keywords)
        inputs = arguments, keywords
        arguments, keywords = keras.tree.map_structure(pin, inputs)
        outputs = call(*arguments, **keywords)
        pinned_inputs = keras.tree.flatten((arguments, keywords))
        for original, copy in zip(keras.tree.flatten(inputs), pinned_inputs, strict=True):
            if isinstance(original, tf.Tensor):
                # Attention clears its inputs' masks in place: clear the copies' masks instead.
                copy_mask(copy, original)
        return keras.tree.map_structure(pin, outputs)

    return pinned


def pin(tensor: object) -> Any:
    """Divides a tensor by rows if it has as many rows as the batch; otherwise makes it whole on each device."""
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank in (None, 0) or tensor.dtype in (tf.resource, tf.variant):
        return tensor
    axes = (ROWS.axis if tensor.shape[0] == ROWS.count else None, *[None] * (len(tensor.shape) - 1))
    pinned = relayout(tensor, axes)
    copy_mask(tensor, pinned)
    return pinned


def pin_on_mesh(tensor: tf.Tensor) -> tf.Tensor:
    """Pins a tensor if this thread traces a step for a mesh."""
    return pin(tensor) if computing_on_mesh() else tensor
