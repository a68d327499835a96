"""The `keras.layers.Normalization` layers of a model, and the input that each of them normalizes."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

BY_HAND = (
    "Call adapt_normalization(layer, data, select=...) for it, where select gives what reaches the layer for an x of "
    "the data."
)


def normalization_layers(model: keras.Model) -> list[keras.layers.Normalization]:
    """The layers of a model, and of the models in it, whose mean and variance are to be found.

    Args:
        model: The model.

    Returns:
        Its `Normalization` layers but those that were made with a `mean` and `variance` of their own.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Normalization(name="scaled"), keras.layers.Dense(1)])
    >>> [layer.name for layer in normalization_layers(model)]
    ['scaled']
    """
    found = {id(layer): layer for layer in _inside(model) if isinstance(layer, keras.layers.Normalization)}
    return [layer for layer in found.values() if layer.input_mean is None]


def selector(model: keras.Model, layer: keras.layers.Normalization) -> Callable[[Any], Any]:
    """A function from the inputs of a model to the one that a layer normalizes.

    Raises:
        ValueError: The layer is not fed by an input of the model, and by nothing else.
    """
    if model.layers[:1] == [layer] and isinstance(model, keras.Sequential):
        return lambda x: x
    inputs = list(getattr(model, "inputs", None) or [])
    fed_by = _input_of(layer)
    index = next((index for index, tensor in enumerate(inputs) if tensor is fed_by), None)
    if index is None:
        raise ValueError(f"The layer {layer.name!r} normalizes something else than an input of the model. {BY_HAND}")
    name = inputs[index].name

    def select(x: Any) -> Any:
        if isinstance(x, dict):
            if name not in x:
                raise ValueError(f"The layer {layer.name!r} normalizes the input {name!r}; the data has {sorted(x)}.")
            return x[name]
        leaves = keras.tree.flatten(x)
        if len(leaves) != len(inputs):
            raise ValueError(f"The model takes {len(inputs)} inputs, and the data has {len(leaves)} for it. {BY_HAND}")
        return leaves[index]

    return select


def _inside(layer: Any) -> Iterator[Any]:
    for part in getattr(layer, "layers", []):
        yield part
        yield from _inside(part)


def _input_of(layer: keras.layers.Layer) -> Any:
    """The one tensor that goes into a layer; `None` if there are several or it was never called."""
    try:
        return layer.input
    except (AttributeError, ValueError):
        return None
