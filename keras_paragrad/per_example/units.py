"""Units: the layers of a model with one rule each; and the layers for which per-example gradients don't exist."""

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import keras

from keras_paragrad.compat.layers import children
from keras_paragrad.per_example.registry import rule_for
from keras_paragrad.per_example.rule import Rule
from keras_paragrad.per_example.rules.generic import Generic
from keras_paragrad.per_example.rules.normalization import needs_its_batch

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
    """The units that together hold all of a layer's trainable weights, each once.

    Args:
        layer: A layer or model.
        whole: The ids of layers not to be split.
    """
    found: dict[int, Unit] = {}
    for unit in _walk(layer, whole):
        found.setdefault(id(unit.layer), unit)
    return list(found.values())


def layers_holding(layer: keras.layers.Layer, variable: keras.Variable) -> list[keras.layers.Layer]:
    """The layer and its sublayers that train a weight; those with the fewest weights, and innermost, first."""
    holders = {
        id(inner): inner
        for inner in all_layers(layer)
        if any(variable is weight for weight in inner.trainable_variables)
    }
    innermost_first = list(holders.values())[::-1]
    return sorted(innermost_first, key=lambda inner: len(inner.trainable_variables))


def check_training(layer: keras.layers.Layer) -> None:
    """Refuses layers that mix the examples of a batch in training.

    Raises:
        ValueError: A layer normalizes by batch statistics, or a dropout mask is shared by all examples.
    """
    for inner in all_layers(layer):
        if isinstance(inner, keras.layers.BatchNormalization) and inner.trainable and not inner.trainable_variables:
            raise ValueError(needs_its_batch(inner))
        shape = getattr(inner, "noise_shape", None)
        if isinstance(inner, keras.layers.Dropout) and inner.rate and shape is not None and shape[0] == 1:
            raise ValueError(
                f"The dropout {inner.name!r} uses one mask for all examples of a batch (noise_shape={shape}), so an "
                "example's gradient depends on its batch. Write "
                f"noise_shape=({', '.join(map(str, (None, *shape[1:])))}) for it."
            )


def all_layers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """A layer and its sublayers, at every depth."""
    yield layer
    for child in children(layer):
        yield from all_layers(child)


def _walk(layer: keras.layers.Layer, whole: Collection[int]) -> Iterator[Unit]:
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
    within = {id(variable) for child in children(layer) for variable in child.trainable_variables}
    return any(id(variable) not in within for variable in layer.trainable_variables)
