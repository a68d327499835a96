"""Normalization layers: a scale and an offset applied to the normalized input."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import attributes
from keras_paragrad.per_example.calls import Call, widened
from keras_paragrad.per_example.reads import Weights
from keras_paragrad.per_example.registry import register_rule
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase


class Normalization(Rule):
    """y = scale * z + offset: an example's gradients are the sums of d * z and d over the axes that share a weight.

    The normalized input z is recomputed by calling the layer without scale and offset.

    Attributes:
        without: The layer attributes that switch both off.
    """

    without: Mapping[str, Any] = {"scale": False, "center": False, "gamma": None, "beta": None}

    def scale(self, layer: Any) -> keras.Variable | None:
        """The scale, or `None`."""
        return layer.gamma

    def offset(self, layer: Any) -> keras.Variable | None:
        """The offset, or `None`."""
        return layer.beta

    def axes(self, layer: Any, rank: int) -> set[int]:
        """The input axes along which the weights vary."""
        axes: Iterable[int] = [layer.axis] if isinstance(layer.axis, int) else layer.axis
        return {axis % rank for axis in axes}

    def variables(self, layer: Any) -> list[keras.Variable]:
        return [weight for weight in (self.scale(layer), self.offset(layer)) if weight is not None]

    def squares(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [tf.square(gradient) for gradient in self.gradients_of_all(calls)]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        cotangent = call.cotangent
        kept = self.axes(call.layer, cotangent.shape.rank)
        summed = [axis for axis in range(1, cotangent.shape.rank) if axis not in kept]
        gradients = []
        if self.scale(call.layer) is not None:
            # The scope keeps the layer from adding its losses a second time.
            with Weights(()), attributes(call.layer, **self.without):
                normalized = widened(call.rerun(call.arguments, call.keywords))
            gradients.append(tf.reduce_sum(cotangent * normalized, summed))
        if self.offset(call.layer) is not None:
            gradients.append(tf.reduce_sum(cotangent, summed))
        return gradients


@register_rule(keras.layers.LayerNormalization, keras.layers.GroupNormalization, keras.layers.BatchNormalization)
class ScaleAndOffsetRule(Normalization):
    """Layer normalization, group normalization, and batch normalization with moving statistics."""

    formula = r"$\sum \delta z$, $\sum \delta$; BatchNormalization in inference mode only"
    norms_without_gradients = "no; they are small"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        if layer is keras.layers.GroupNormalization:
            make = functools.partial(layer, groups=pick([1, 2, -1]), center=pick([True, False]))
            return RuleCase(make, pick([(5, 6), (3, 2, 6)]))
        if layer is keras.layers.BatchNormalization:
            return RuleCase(functools.partial(layer, axis=pick([-1, 1])), (4, 6))
        center = pick([True, False])
        scale = pick([True, False]) if center else True
        return RuleCase(functools.partial(layer, axis=pick([-1, 1, [1, 2]]), center=center, scale=scale), (4, 6))

    def run(self, call: Call, function: Any, reads: Any) -> Any:
        if call.training and isinstance(call.layer, keras.layers.BatchNormalization):
            raise ValueError(needs_its_batch(call.layer))
        return super().run(call, function, reads)


@register_rule(keras.layers.RMSNormalization)
class RMSNormalizationRule(Normalization):
    """RMS normalization, with a scale only."""

    formula = r"$\sum \delta z$"
    norms_without_gradients = "no; they are small"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return RuleCase(functools.partial(layer, axis=pick([-1, [1, 2]])), (4, 6))

    without: Mapping[str, Any] = {"scale": None}

    def scale(self, layer: Any) -> keras.Variable:
        return layer.scale

    def offset(self, layer: Any) -> None:
        return None


def needs_its_batch(layer: keras.layers.BatchNormalization) -> str:
    """The error message for batch normalization in training."""
    return (
        f"{layer.name!r} normalizes each example by the statistics of its batch, so an example has no gradient of its "
        "own. Use keras.layers.GroupNormalization in its place, or freeze it: layer.trainable = False."
    )
