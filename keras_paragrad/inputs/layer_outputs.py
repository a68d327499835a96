"""Differentiates with respect to a layer's output within its model's call, instead of an input."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import attributes, call_method, mask_of, with_mask
from keras_paragrad.compat.types import Structure

_NAME_IT = "pass the tensor through keras.layers.Identity(name=...), and name that layer"


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
def outputs_exchanged(
    sources: Sequence[LayerOutput], rows: int | None, exchange: Callable[[LayerOutput, tf.Tensor], tf.Tensor]
) -> Generator[None]:
    """Context in which a source layer's call returns `exchange(source, output)`, with the mask of the output.

    `exchange` is called while the model is; `rows` is the number of rows of each output.

    Raises:
        ValueError: A layer is not called, or more than once, or returns something that has no derivative by row.
    """
    graph, refused = tf.compat.v1.get_default_graph(), list[ValueError]()
    # How often each layer has been called, by `id`.
    calls = {id(source.layer): 0 for source in sources}

    def exchanging(layer: keras.layers.Layer, call: Callable[..., Structure]) -> Callable[..., Structure]:
        def exchanged(*arguments: Any, **keywords: Any) -> Structure:
            outputs = call(*arguments, **keywords)
            number = calls[id(layer)]
            calls[id(layer)] += 1
            for source in sources:
                if source.layer is layer and source.call in (None, number):
                    mask = mask_of(outputs)
                    try:
                        value = _check_output(source, outputs, rows, graph)
                    except ValueError as error:
                        refused.append(error)
                        raise
                    outputs = with_mask(tf.identity(tf.cast(exchange(source, value), value.dtype)), mask)
            return outputs

        return exchanged

    with contextlib.ExitStack() as stack:
        for layer in {id(source.layer): source.layer for source in sources}.values():
            method = call_method(layer)
            stack.enter_context(attributes(layer, **{method: exchanging(layer, getattr(layer, method))}))
        try:
            yield
        except Exception:
            # Keras has added the layer's arguments to the message.
            if refused:
                raise refused[0] from None
            raise
    for source in sources:
        _check_calls(source, calls[id(source.layer)])


def _check_calls(source: LayerOutput, calls: int) -> None:
    """Refuses a layer that isn't called as often as the source states."""
    if source.call is None and calls > 1:
        raise ValueError(
            f"The layer {source.name!r} is called {calls} times when the model is called. Write "
            f"wrt={f'{source.name}:0'!r} for its first call, and so on to {f'{source.name}:{calls - 1}'!r}."
        )
    if calls <= (source.call or 0):
        requested = source.name if source.call is None else f"{source.name}:{source.call}"
        times = f"called {calls} time{'s' * (calls > 1)}" if calls else "not called"
        write = f"Write wrt={f'{source.name}:0'!r} for its first call." if calls else "Name a layer that is."
        raise ValueError(
            f"`wrt` is {requested!r}, and that layer is {times} when the model is called with training=False. {write}"
        )


def _check_output(source: LayerOutput, outputs: Any, rows: int | None, graph: tf.Graph) -> tf.Tensor:
    """Validates a layer's output; returns it as a tensor `(rows, ...)` of real numbers."""
    if keras.tree.is_nested(outputs):
        raise ValueError(
            f"The layer {source.name!r} gives {len(keras.tree.flatten(outputs))} tensors. To differentiate with "
            f"respect to one of them, {_NAME_IT}."
        )
    if not isinstance(outputs, tf.Tensor):
        raise ValueError(
            f"The layer {source.name!r} gives a {type(outputs).__name__}. Name a layer that gives a tensor."
        )
    if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not graph:
        raise ValueError(
            f"The layer {source.name!r} is called in a loop, a branch or a tf.function, so its output can't "
            "be taken. Name the layer that calls it."
        )
    if not outputs.dtype.is_floating:
        raise ValueError(
            f"The output of layer {source.name!r} is {outputs.dtype.name}, and only real values have a gradient. Name "
            "a layer after it, such as an embedding."
        )
    shape = outputs.shape
    if shape.rank and shape[0] is None:
        outputs = tf.ensure_shape(outputs, [rows, *shape[1:]])
    if not outputs.shape.is_fully_defined() or not outputs.shape.rank or outputs.shape[0] != rows:
        raise ValueError(
            f"The output of layer {source.name!r} has shape {shape} for {rows} rows, and must have shape "
            f"({rows}, ...), of known sizes, with values for each row that depend on no other row. Name another layer, "
            "or fix the sizes that are None."
        )
    return outputs
