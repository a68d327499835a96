"""Finds the layers to recompute by name, and checks that they can be recomputed."""

import difflib
from typing import Any

import keras

from keras_paragrad.arguments import check_each, quote, refusal
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.step.recompute import is_recomputed
from keras_paragrad.engine.step.segments import functional_of, recomputes_parts
from keras_paragrad.per_example.wrapper import PerExampleGradients

_WHAT = "names of the model's layers, or the layers"
_EXAMPLE = '["block_0", "block_1"]'


def select_layers(model: keras.Model, layers: Any) -> list[keras.layers.Layer]:
    """The layers to recompute.

    Args:
        model: The model.
        layers: The layers or their names.

    Raises:
        ValueError: One is not in the model, contains another, or can't be recomputed.
    """

    def check(name: str, value: Any) -> keras.layers.Layer:
        if isinstance(value, keras.layers.Layer):
            return value
        if not isinstance(value, str):
            raise refusal(name, value, "a layer or its name")
        return _find_layer(model, value)

    chosen = list(check_each("layers", layers, check, _WHAT, example=_EXAMPLE))
    if not chosen:
        raise refusal("layers", layers, f"at least one of the {_WHAT}", _EXAMPLE)
    for index, layer in enumerate(chosen):
        if any(layer is other for other in chosen[:index]):
            raise ValueError(f"`layers` has {layer.name!r} twice. Write it once.")
        check_layer(model, layer)
    for layer in chosen:
        nested = next((inner for inner in all_layers(layer) if any(inner is other for other in chosen)), None)
        if nested is not None:
            raise ValueError(
                f"`layers` has {layer.name!r} and {nested.name!r}, which is a part of it and is recomputed with it. "
                "Leave one of them out."
            )
    return chosen


def check_layer(model: keras.Model, layer: keras.layers.Layer) -> None:
    """Refuses a layer that can't be recomputed.

    Raises:
        ValueError: The message says why.
    """
    if not any(layer is each for each in all_layers(model)):
        raise ValueError(f"{layer.name!r} is not a layer of {model.name!r}, nor of a layer in it.")
    if isinstance(layer, keras.layers.InputLayer):
        raise ValueError(f"{layer.name!r} is an input of the model, and computes nothing. Leave it out of `layers`.")
    parents = [each for each in (model, *all_layers(model)) if any(layer is inner for inner in all_layers(each))]
    for each in (layer, *all_layers(layer), *parents):
        check_nesting(layer, each)
    loop = next((each for each in parents if isinstance(each, keras.layers.RNN)), None)
    if loop is not None:
        raise ValueError(
            f"{layer.name!r} is a cell of {loop.name!r}, which calls it in a loop. Name {loop.name!r} instead."
        )
    if layer.quantization_mode is not None:
        raise ValueError(
            f"{layer.name!r} is quantized, and a quantized layer can't be recomputed by itself. Name a block that "
            "contains it."
        )


def check_nesting(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Refuses a layer that contains another, or is contained in it, if the other can't be recomputed with it.

    Raises:
        ValueError: The other is recomputed already, or computes per-example gradients.
    """
    if is_recomputed(other) or (isinstance(other, keras.Model) and recomputes_parts(functional_of(other))):
        raise ValueError(f"{other.name!r} is recomputed already. Call undo() of the handle that recompute returned.")
    if isinstance(other, PerExampleGradients):
        raise ValueError(
            f"{layer.name!r} and the PerExampleGradients layer {other.name!r} are within each other. Per-example "
            "gradients are computed from the inputs that each layer keeps. To save memory there, train in smaller "
            "batches with AccumulatingOptimizer, or name layers before the PerExampleGradients layer."
        )


def _find_layer(model: keras.Model, name: str) -> keras.layers.Layer:
    layers = all_layers(model)
    matches = [layer for layer in layers if layer.name == name]
    top = [layer for layer in model.layers if layer.name == name]
    if len(top) == 1 or len(matches) == 1:
        return (top or matches)[0]
    if matches:
        raise ValueError(
            f"{model.name!r} has {len(matches)} layers named {name!r}. Pass the layers themselves, as in "
            'layers=[model.get_layer("block_0")].'
        )
    names = [layer.name for layer in layers if not isinstance(layer, keras.layers.InputLayer)]
    close = difflib.get_close_matches(name, names, n=3) or names[:10]
    raise ValueError(f"`layers` has {quote(name)}, and no layer of {model.name!r} has that name. Layers: {close}.")
