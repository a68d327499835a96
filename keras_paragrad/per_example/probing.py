"""Splits a model into units, by calling it on placeholders."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import called_for_training
from keras_paragrad.engine.probes.untouched import never_run, untouched
from keras_paragrad.engine.step.gradient_functions import releasing
from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.units import Unit, layers_holding, units_of

# A batch size that no other axis is likely to have: an output with another first axis is not a batch of examples.
BATCH = 1009

_KNOWN: "weakref.WeakKeyDictionary[keras.layers.Layer, dict]" = weakref.WeakKeyDictionary()


def units_for(layer: keras.layers.Layer, arguments: tuple, keywords: dict[str, Any]) -> list[Unit]:
    """The units of a layer that is to be called with the given arguments.

    A layer that reads the weights of its sublayers, or calls them in a loop or on something other than a batch of
    examples, is a single unit.

    Args:
        layer: A built layer or model.
        arguments: The positional arguments of the call.
        keywords: The keyword arguments of the call.
    """
    known = _KNOWN.setdefault(layer, {})
    weights = tuple(id(variable) for variable in layer.trainable_variables)
    key = (weights, called_for_training(), *map(_kind, keras.tree.flatten((arguments, keywords))))
    if key not in known:
        units, is_known = _probed(layer, arguments, keywords)
        if not is_known:
            return units
        known[key] = units
    return known[key]


def _kind(value: Any) -> Any:
    return (value.dtype, *value.shape[1:]) if tf.is_tensor(value) else repr(value)


def _probed(layer: keras.layers.Layer, arguments: tuple, keywords: dict[str, Any]) -> tuple[list[Unit], bool]:
    """Returns the units, and whether the call on placeholders succeeded."""
    whole: set[int] = set()
    size = BATCH
    while True:
        units = units_of(layer, whole)
        capture, is_done = _called_on_placeholders(layer, units, arguments, keywords, size)
        variable = capture.weight_without_batch(size) if is_done else capture.obstacle
        larger = [] if variable is None else layers_holding(layer, variable)
        larger = [holder for holder in larger if not any(holder is unit.layer for unit in units)]
        if larger:
            whole.add(id(larger[0]))
        elif is_done:
            return [Unit(unit.layer, unit.rule, capture.batched(unit, size)) for unit in units], True
        elif variable is None and size == BATCH and _first_axis(arguments, keywords):
            # The model may only accept one batch size.
            size = _first_axis(arguments, keywords) or BATCH
        else:
            # The real call will raise a meaningful error.
            return units, False


def _called_on_placeholders(
    layer: keras.layers.Layer, units: list[Unit], arguments: tuple, keywords: dict[str, Any], size: int
) -> tuple[Capture, bool]:
    """Calls a layer with batches of the given size; also returns whether the call succeeded."""
    flat = keras.tree.flatten((arguments, keywords))
    first = _first_axis(arguments, keywords)
    places = [place for place, value in enumerate(flat) if _is_tensor(value) and value.shape[0] == first]
    captures: list[Capture] = []

    def call(*placeholders):
        probe = list(flat)
        for place, placeholder in zip(places, placeholders, strict=True):
            probe[place] = placeholder
        captures.append(Capture(layer, units, tf.zeros([])))
        arguments_of_probe, keywords_of_probe = keras.tree.pack_sequence_as((arguments, keywords), probe)
        with untouched(layer, never_run()):
            captures[0](*arguments_of_probe, **keywords_of_probe)
        return tf.zeros([])

    specifications = [tf.TensorSpec([size, *flat[place].shape[1:]], flat[place].dtype) for place in places]
    try:
        tf.function(releasing(call), autograph=False).get_concrete_function(*specifications)
    except Exception:
        # The real call will raise the same error, unless the batch size caused it.
        return captures[0], False
    return captures[0], True


def _first_axis(arguments: tuple, keywords: dict[str, Any]) -> int | None:
    flat = keras.tree.flatten((arguments, keywords))
    return next((value.shape[0] for value in flat if _is_tensor(value)), None)


def _is_tensor(value: Any) -> bool:
    return bool(tf.is_tensor(value) and value.shape.rank)
