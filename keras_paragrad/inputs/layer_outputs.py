"""Differentiates with respect to a layer's output within its model's call, instead of an input."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import call_method, mask_of, override_attributes, with_mask
from keras_paragrad.compat.types import Structure

_NAME_ANOTHER = (
    "Name a layer around or after it, or pass one tensor through keras.layers.Identity(name=...), and name that."
)


class LayerOutput(NamedTuple):
    """A layer's output when its model is called.

    Attributes:
        name: What `wrt` calls it.
        layer: The layer.
        call: The number of its call, from 0; `None` for a layer that is called once.
    """

    name: str
    layer: keras.layers.Layer
    call: int | None

    def __str__(self) -> str:
        return f"the output of layer {self.name!r}"


@contextlib.contextmanager
def output_exchanged(
    source: LayerOutput, rows: int | None, exchange: Callable[[tf.Tensor], tf.Tensor]
) -> Generator[None]:
    """Context in which a source layer's call returns `exchange(output)`, with the mask of the output.

    `exchange` is called while the model is; `rows` is the number of rows of the output.

    Raises:
        ValueError: The layer is not called, or more than once, or returns something that has no derivative by row.
    """
    graph, refused, times = tf.compat.v1.get_default_graph(), list[ValueError](), 0
    method = call_method(source.layer)
    call = getattr(source.layer, method)

    def exchanged(*arguments: Any, **keywords: Any) -> Structure:
        nonlocal times
        outputs, number = call(*arguments, **keywords), times
        times += 1
        if source.call not in (None, number):
            return outputs
        try:
            value = checked_rows(outputs, rows, f"The output of layer {source.name!r}", _NAME_ANOTHER)
            if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not graph:
                raise ValueError(
                    f"The layer {source.name!r} is called in a loop, a branch or a tf.function, so its output can't "
                    f"be taken. {_NAME_ANOTHER}"
                )
        except ValueError as error:
            refused.append(error)
            raise
        return with_mask(tf.identity(tf.cast(exchange(value), value.dtype)), mask_of(outputs))

    try:
        with override_attributes(source.layer, **{method: exchanged}):
            yield
    except Exception:
        # Keras has added the layer's arguments to the message.
        if refused:
            raise refused[0] from None
        raise
    if times <= (source.call or 0) or (source.call is None and times > 1):
        name = source.name if source.call is None else f"{source.name}:{source.call}"
        write = f"Write wrt={f'{source.name}:0'!r} for its first call." if times else "Name a layer that is."
        raise ValueError(
            f"`wrt` is {name!r}, and that layer is called {times} times when the model is called with "
            f"training=False. {write}"
        )


def checked_rows(value: Any, rows: int | None, name: str, advice: str) -> tf.Tensor:
    """Returns `value` as a tensor `(rows, ...)` of real numbers; refuses others, with `name` and `advice`."""
    if keras.tree.is_nested(value):
        found = f"{len(keras.tree.flatten(value))} tensors"
    elif not isinstance(value, tf.Tensor):
        found = f"a {type(value).__name__}"
    elif not value.dtype.is_floating:
        found = f"{value.dtype.name}, which has no derivative"
    else:
        found = f"of shape {value.shape} for {rows} rows"
        if value.shape.rank and value.shape[0] is None:
            value = tf.ensure_shape(value, [rows, *value.shape[1:]])
        if value.shape.is_fully_defined() and value.shape.rank and value.shape[0] == rows:
            return value
    raise ValueError(
        f"{name} is {found}, and must be one tensor of real numbers of shape ({rows}, ...), of known sizes, with "
        f"values for each row that depend on no other row. {advice}"
    )
