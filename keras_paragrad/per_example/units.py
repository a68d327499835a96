"""Splits a model into units, layers with one rule each; refuses layers without per-example gradients."""

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import keras

from keras_paragrad.compat.layers import children
from keras_paragrad.per_example.rule import Rule, rule_for
from keras_paragrad.per_example.rules.generic import Generic
from keras_paragrad.per_example.rules.normalization import batch_statistics_refusal

_LOGGER = logging.getLogger("keras_paragrad")
_GENERIC = Generic()


class Unit(NamedTuple):
    """A layer whose gradients are computed by one rule.

    Attributes:
        layer: The layer.
        rule: Its rule.
        batched: For each of its calls, which of the flattened arguments have a row for each example, if known.
    """

    layer: keras.layers.Layer
    rule: Rule
    batched: Sequence[Sequence[bool]] = ()


def units_of(layer: keras.layers.Layer, whole: Collection[int] = ()) -> list[Unit]:
    """The units that hold a layer's trainable weights, each once; sublayers with ids in `whole` are not split."""
    units: dict[int, Unit] = {}
    for unit in _walk(layer, whole):
        units.setdefault(id(unit.layer), unit)
    return list(units.values())


def layers_with_variable(layer: keras.layers.Layer, variable: keras.Variable) -> list[keras.layers.Layer]:
    """The layer and its sublayers with a trainable weight; those with the fewest weights, and innermost, first."""
    layers_by_id = {
        id(inner): inner
        for inner in layer_and_sublayers(layer)
        if any(variable is weight for weight in inner.trainable_variables)
    }
    innermost_first = list(layers_by_id.values())[::-1]
    return sorted(innermost_first, key=lambda inner: len(inner.trainable_variables))


def check_training(layer: keras.layers.Layer) -> None:
    """Refuses layers that normalize by batch statistics, and dropout masks that all examples share."""
    for inner in layer_and_sublayers(layer):
        if isinstance(inner, keras.layers.BatchNormalization) and inner.trainable and not inner.trainable_variables:
            raise batch_statistics_refusal(inner)
        shape = getattr(inner, "noise_shape", None)
        if isinstance(inner, keras.layers.Dropout) and inner.rate and shape is not None and shape[0] == 1:
            raise ValueError(
                f"The dropout {inner.name!r} uses one mask for all examples of a batch (noise_shape={shape}), so an "
                "example's gradient depends on its batch. Write "
                f"noise_shape=({', '.join(map(str, (None, *shape[1:])))}) for it."
            )


def layer_and_sublayers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """A layer and its sublayers, at every depth."""
    yield layer
    for child in children(layer):
        yield from layer_and_sublayers(child)


def _walk(layer: keras.layers.Layer, whole: Collection[int]) -> Iterator[Unit]:
    """The units of a layer, which may occur repeatedly."""
    if not layer.trainable_variables:
        return
    rule = rule_for(layer)
    if rule is None and (id(layer) in whole or _owns_weights(layer)):
        rule = _GENERIC
        _LOGGER.info(
            "%s has no per-example rule, so its gradients are computed one example at a time. To make that faster, "
            "register a rule with keras_paragrad.per_example.register_rule.",
            type(layer).__name__,
        )
    if rule is not None:
        yield Unit(layer, rule)
        return
    for child in children(layer):
        yield from _walk(child, whole)


def _owns_weights(layer: keras.layers.Layer) -> bool:
    """Whether a layer trains weights that belong to none of its sublayers."""
    of_children = {id(variable) for child in children(layer) for variable in child.trainable_variables}
    return any(id(variable) not in of_children for variable in layer.trainable_variables)
