"""The layers of a model that have a rule each, and those that have no per-example gradients at all."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import keras

from keras_paragrad._keras.layers import children
from keras_paragrad.per_example.registry import Rule, rule_for
from keras_paragrad.per_example.rules.generic import Generic

_LOGGER = logging.getLogger("keras_paragrad")
_GENERIC = Generic()


class Unit(NamedTuple):
    """A layer whose gradients one rule gives."""

    layer: keras.layers.Layer
    rule: Rule


def units_of(layer: keras.layers.Layer) -> list[Unit]:
    """The units that own all of a layer's trainable weights, each once."""
    found: dict[int, Unit] = {}
    for unit in _walk(layer):
        found.setdefault(id(unit.layer), unit)
    return list(found.values())


def check_layers(layer: keras.layers.Layer) -> None:
    """Refuses what mixes the examples of a batch whatever it is called with.

    Raises:
        ValueError: A dropout's mask is the same for all examples.
    """
    for inner in _all(layer):
        shape = getattr(inner, "noise_shape", None)
        if isinstance(inner, keras.layers.Dropout) and inner.rate and shape is not None and shape[0] == 1:
            raise ValueError(
                f"The dropout {inner.name!r} drops the same units for all examples of a batch (noise_shape={shape}), "
                "so that what an example's gradient is depends on its batch. Write "
                f"noise_shape=({', '.join(map(str, (None, *shape[1:])))}) for it."
            )


def check_training(layer: keras.layers.Layer) -> None:
    """Refuses what mixes the examples of a batch in training.

    Raises:
        ValueError: A layer normalizes by the batch's statistics.
    """
    for inner in _all(layer):
        if isinstance(inner, keras.layers.BatchNormalization) and inner.trainable:
            raise ValueError(
                f"{inner.name!r} normalizes each example by the statistics of its batch, so an example has no gradient "
                "of its own. Use keras.layers.GroupNormalization in its place, or freeze it: layer.trainable = False."
            )


def _all(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    yield layer
    for child in children(layer):
        yield from _all(child)


def _walk(layer: keras.layers.Layer) -> Iterator[Unit]:
    if not layer.trainable_variables:
        return
    rule = rule_for(layer)
    if rule is None and _owns_weights(layer):
        rule = _GENERIC
        _LOGGER.info(
            "%s has no per-example rule, so its examples are gone through one by one. To make that faster, give it one "
            "with keras_paragrad.per_example.register_rule.",
            type(layer).__name__,
        )
    if rule is not None:
        yield Unit(layer, rule)
        return
    for child in children(layer):
        yield from _walk(child)


def _owns_weights(layer: keras.layers.Layer) -> bool:
    """Whether a layer trains weights that none of the layers within it has."""
    within = {id(variable) for child in children(layer) for variable in child.trainable_variables}
    return any(id(variable) not in within for variable in layer.trainable_variables)
