"""Finds a model's units, by calls on placeholders and a proof on a few rows."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import called_for_training
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.per_example.capture import Capture, has_axes
from keras_paragrad.per_example.proof import find_wrong_sum, is_own
from keras_paragrad.per_example.rule import Rule
from keras_paragrad.per_example.units import (
    Unit,
    call_signature,
    layers_with_variable,
    units_of,
)

# A batch size that no other axis is likely to have: an output with another first axis is not a batch of examples.
_PROBE_BATCH = 1009

# The results of `units_for`, for each layer by its key.
_UNITS: "weakref.WeakKeyDictionary[keras.layers.Layer, dict[Any, Any]]" = weakref.WeakKeyDictionary()


def units_for(layer: keras.layers.Layer, arguments: tuple[Structure, ...], keywords: dict[str, Any]) -> list[Unit]:
    """The units of a built layer that is to be called with the given arguments, found by calls on placeholders.

    A layer that reads the weights of its sublayers, or calls them in a loop or on something other than a batch of
    examples, is a single unit.
    """
    known = _UNITS.setdefault(layer, {})
    weights = tuple(id(variable) for variable in layer.trainable_variables)
    key = (weights, called_for_training(), *call_signature(layer, (arguments, keywords)))
    if key not in known:
        units, succeeded = _probe_units(layer, arguments, keywords)
        if not succeeded:
            return units
        known[key] = units
    return known[key]


def _probe_units(
    layer: keras.layers.Layer, arguments: tuple[Structure, ...], keywords: dict[str, Any]
) -> tuple[list[Unit], bool]:
    """The units found by calls on placeholders, and whether the last such call succeeded."""
    indivisible: set[int] = set()
    size = _PROBE_BATCH
    wrong: keras.Variable | None = None
    lost: keras.layers.Layer | None = None
    # Each turn makes another layer a single unit, or is the last one with its size; at most two sizes are tried.
    while True:
        units = units_of(layer, indivisible)
        capture, succeeded = _call_on_placeholders(layer, units, arguments, keywords, size)
        # The innermost layer that gets rows of unknown number; later turns see those around it.
        lost = capture.layer_without_rows if lost is None else lost
        variable = capture.weight_without_batch(size) if succeeded else capture.offending_weight
        holders = _divided_holders(layer, variable, units, indivisible)
        if succeeded and not holders:
            if lost is not None and capture.layer_without_rows is not None:
                raise ValueError(
                    f"The number of rows of the output of {lost.name!r} is unknown, and so which rows belong to "
                    "which example. State it in the layer before that loses it: outputs = tf.ensure_shape(outputs, "
                    "[inputs.shape[0], ...]), if there is one row for each example. What prepares data, such as "
                    "TextVectorization, can go into the dataset: dataset.map(lambda x, y: (layer(x), y))."
                )
            units = [Unit(unit.layer, unit.rule, capture.batched(unit, size)) for unit in units]
            different = find_wrong_sum(layer, units, arguments, keywords, capture.graph, wrong)
            if different is None:
                return units, True
            wrong = different if wrong is None else wrong
            # As a single unit, a layer may do what its sublayers' units can't, such as differentiate them.
            holders = _divided_holders(layer, different, units, indivisible)
            trains = [unit for unit in units if any(different is each for each in unit.layer.trainable_variables)]
            rule = next((unit.rule for unit in trains if not is_own(unit)), None)
            if rule or not holders:
                raise _unequal_sum_refusal(layer, wrong, rule)
        if holders:
            indivisible.add(id(holders[0]))
        elif variable is None and size == _PROBE_BATCH and _batch_size(arguments, keywords):
            # The model may only accept one batch size.
            size = _batch_size(arguments, keywords) or _PROBE_BATCH
        else:
            # The real call will raise a meaningful error.
            return units, False


def _divided_holders(
    layer: keras.layers.Layer, variable: keras.Variable | None, units: list[Unit], indivisible: set[int]
) -> list[keras.layers.Layer]:
    """The layers with a variable that aren't single units yet, innermost first."""
    single = indivisible.union(id(unit.layer) for unit in units)
    holders = [] if variable is None else layers_with_variable(layer, variable)
    return [holder for holder in holders if id(holder) not in single]


def _unequal_sum_refusal(layer: keras.layers.Layer, variable: keras.Variable, rule: Rule | None) -> ValueError:
    """The error for a weight whose examples' gradients don't sum to its gradient; `rule` is the user's, if one is."""
    owner = layers_with_variable(layer, variable)[0].name
    cause = (
        f"Correct the rule {type(rule).__name__}."
        if rule
        else "If it is called through keras.remat or tf.recompute_grad, call it directly: that takes no more memory "
        "here, as its inputs are kept. If add_loss() takes a gradient with respect to its inputs, return that as an "
        "output, and use it in the loss. If it has a tf.custom_gradient, register a rule for it with "
        "keras_paragrad.per_example.register_rule."
    )
    return ValueError(
        f"The gradients of the examples of {owner!r} don't sum to its gradient in a plain step: on a few rows, "
        f"that of {variable.path!r} differs. {cause}"
    )


def _call_on_placeholders(
    layer: keras.layers.Layer, units: list[Unit], arguments: tuple[Structure, ...], keywords: dict[str, Any], size: int
) -> tuple[Capture, bool]:
    """Calls a layer with placeholders of `size` rows; returns the capture, and whether the call succeeded."""
    flat = keras.tree.flatten((arguments, keywords))
    batch_size = _batch_size(arguments, keywords)
    indices = [index for index, value in enumerate(flat) if has_axes(value) and value.shape[0] == batch_size]
    captures: list[Capture] = []

    def call(*placeholders: tf.Tensor):
        probe = list(flat)
        for index, placeholder in zip(indices, placeholders, strict=True):
            probe[index] = placeholder
        captures.append(Capture(layer, units, tf.zeros([])))
        probe_arguments, probe_keywords = keras.tree.pack_sequence_as((arguments, keywords), probe)
        captures[0](*probe_arguments, **probe_keywords)
        return tf.zeros([])

    specs = [tf.TensorSpec([size, *flat[index].shape[1:]], flat[index].dtype) for index in indices]
    try:
        trace_untouched(layer, call, *specs)
    except Exception:
        # The real call will raise the same error, unless the batch size caused it.
        return captures[0], False
    return captures[0], True


def _batch_size(arguments: tuple[Structure, ...], keywords: dict[str, Any]) -> int | None:
    """The size of the first axis of the first tensor; `None` if there is none, or its size is unknown."""
    return next((value.shape[0] for value in keras.tree.flatten((arguments, keywords)) if has_axes(value)), None)
