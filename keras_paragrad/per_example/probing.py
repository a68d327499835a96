"""Which layers of a model can be taken apart into units, found out by calling it on placeholders."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.units import Unit, holders_of, units_of

# A size that no other axis is likely to have: what leaves a layer with another was no batch of examples.
BATCH = 1009

_WHOLE: "weakref.WeakKeyDictionary[keras.layers.Layer, set[int]]" = weakref.WeakKeyDictionary()


def units_for(layer: keras.layers.Layer, arguments: tuple, keywords: dict[str, Any]) -> list[Unit]:
    """The units of a layer that is to be called with the given arguments.

    A layer that reads weights of the layers within it, or calls them in a loop or on something that is no batch of
    examples, is one unit as a whole.

    Args:
        layer: A built layer or model.
        arguments: The positional arguments of the call.
        keywords: The keyword arguments of the call.
    """
    whole = _WHOLE.get(layer)
    if whole is None:
        whole, finished = _not_taken_apart(layer, arguments, keywords)
        if finished:
            _WHOLE[layer] = whole
    return units_of(layer, whole)


def _not_taken_apart(layer: keras.layers.Layer, arguments: tuple, keywords: dict[str, Any]) -> tuple[set[int], bool]:
    """The ids of the layers that have to be units as a whole, and whether the placeholders went through."""
    whole: set[int] = set()
    while True:
        units = units_of(layer, whole)
        variable, finished = _weight_in_the_way(layer, units, arguments, keywords)
        larger = [] if variable is None else holders_of(layer, variable)
        larger = [holder for holder in larger if not any(holder is unit.layer for unit in units)]
        # Where nothing larger is left, the call itself says what is wrong.
        if not larger:
            return whole, finished
        whole.add(id(larger[0]))


def _weight_in_the_way(
    layer: keras.layers.Layer, units: list[Unit], arguments: tuple, keywords: dict[str, Any]
) -> tuple[keras.Variable | None, bool]:
    """A weight that a larger unit would have to have, or `None`; and whether the placeholders went through."""
    flat = keras.tree.flatten((arguments, keywords))
    places = [place for place, value in enumerate(flat) if tf.is_tensor(value) and value.shape.rank]
    captures: list[Capture] = []

    def call(*placeholders):
        probe = list(flat)
        for place, placeholder in zip(places, placeholders, strict=True):
            probe[place] = placeholder
        captures.append(Capture(layer, units, tf.zeros([])))
        arguments_of_probe, keywords_of_probe = keras.tree.pack_sequence_as((arguments, keywords), probe)
        captures[0](*arguments_of_probe, **keywords_of_probe)
        return tf.zeros([])

    specifications = [tf.TensorSpec([BATCH, *flat[place].shape[1:]], flat[place].dtype) for place in places]
    try:
        tf.function(call, autograph=False).get_concrete_function(*specifications)
    except Exception:
        # What went wrong for another reason, such as a batch of a size that the model is not made for, goes wrong in
        # the call itself or is none.
        return captures[0].in_the_way, False
    return captures[0].without_batch(BATCH), True
