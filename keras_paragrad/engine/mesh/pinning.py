"""Tensors between layers, divided by rows alone: what DTensor does to others is not always right."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_paragrad.compat.layers import attributes, children, copy_mask
from keras_paragrad.compat.model import all_layers
from keras_paragrad.storage.dtensor import computing_on_mesh, relayout

# Of DTensor's rules, those for their operations are right however their tensors are divided. So what one Dense layer
# divides by units, the next can take as it is.
_FREE = (
    keras.layers.Dense,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.Identity,
)
# Heads stay divided from one of their layers to the next, and cells compute with whole weights.
_CLOSED = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention, keras.layers.RNN)


class TracedRows(threading.local):
    """How the rows of the batch are divided for which a step is traced.

    Attributes:
        count: The number of rows.
        axis: What they are divided along, or `None`.
    """

    count: int = 0
    axis: str | None = None


ROWS = TracedRows()


@contextlib.contextmanager
def pinned_between_layers(model: Any) -> Iterator[None]:
    """Context in which layers take and give tensors that are divided by rows, and by nothing else.

    DTensor chooses for itself how tensors are divided that a step makes, and gives wrong values for some choices: of a
    concatenation along a divided dimension, or of a reshape that splits one.
    """
    inside = {id(each) for layer in all_layers(model) if isinstance(layer, _CLOSED) for each in _within(layer)}
    # Such as TimeDistributed, which stacks what its layer makes.
    wrapped = {id(layer.layer) for layer in all_layers(model) if isinstance(layer, keras.layers.Wrapper)}
    free = {id(layer) for layer in all_layers(model) if type(layer) in _FREE} - wrapped
    chosen = [layer for layer in all_layers(model) if id(layer) not in inside | free]
    with contextlib.ExitStack() as stack:
        for layer in [model, *(each for each in chosen if not isinstance(each, keras.Model))]:
            stack.enter_context(attributes(layer, call=_calling(layer.call)))
        yield


def _within(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for each in children(layer):
        yield each
        yield from _within(each)


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def pinned(*arguments: Any, **keywords: Any) -> Any:
        if in_symbolic_scope() or not computing_on_mesh():
            return call(*arguments, **keywords)
        given = arguments, keywords
        arguments, keywords = keras.tree.map_structure(pin, given)
        found = call(*arguments, **keywords)
        for before, inside in zip(keras.tree.flatten(given), keras.tree.flatten((arguments, keywords)), strict=True):
            if isinstance(before, tf.Tensor):
                # Attention takes masks off its inputs: other layers find these as they would be without pins.
                copy_mask(inside, before)
        return keras.tree.map_structure(pin, found)

    return pinned


def pin(tensor: Any) -> Any:
    """A tensor of a step that is traced for a mesh, divided by rows if it has as many as the batch; or else whole."""
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank in (None, 0) or tensor.dtype in (tf.resource, tf.variant):
        return tensor
    axes = (ROWS.axis if tensor.shape[0] == ROWS.count else None, *[None] * (len(tensor.shape) - 1))
    found = relayout(tensor, axes)
    copy_mask(tensor, found)
    return found


def pinned_in_steps(tensor: Any) -> Any:
    """A tensor as `pin` lays it out, if it is of a step on a mesh; or else as it is."""
    return pin(tensor) if computing_on_mesh() else tensor
