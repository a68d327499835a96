"""Normalization layers: a scale and an offset applied to the normalized input."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.types import Structure
from keras_paragrad.per_example.calls import Call, FixedWeights, WeightReads, widened
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase, register_rule


class Normalization(Rule):
    """y = scale * z + offset: an example's gradients are the sums of d * z and d over the axes that share a weight.

    The normalized input z is recomputed by calling the layer without scale and offset: with the attributes `disabled`.
    """

    disabled: Mapping[str, Any] = {"scale": False, "center": False, "gamma": None, "beta": None}

    def scale(self, layer: keras.layers.Layer) -> keras.Variable | None:
        return layer.gamma

    def offset(self, layer: keras.layers.Layer) -> keras.Variable | None:
        return layer.beta

    def axes(self, layer: keras.layers.Layer, rank: int) -> set[int]:
        """The input axes along which the weights vary."""
        axes: Iterable[int] = [layer.axis] if isinstance(layer.axis, int) else layer.axis
        return {axis % rank for axis in axes}

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        return [weight for weight in (self.scale(layer), self.offset(layer)) if weight is not None]

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        return [tf.square(gradient) for gradient in self.gradients_of_all(calls)]

    def gradients(self, call: Call) -> list[tf.Tensor]:
        cotangent = call.cotangent
        axes = self.axes(call.layer, cotangent.shape.rank)
        summed = [axis for axis in range(1, cotangent.shape.rank) if axis not in axes]
        gradients = []
        if self.scale(call.layer) is not None:
            # The scope keeps the layer from adding its losses a second time.
            with FixedWeights(()), override_attributes(call.layer, **self.disabled):
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

    def run(self, call: Call, function: Callable[..., Structure], reads: WeightReads) -> Structure:
        if call.training and isinstance(call.layer, keras.layers.BatchNormalization):
            raise batch_statistics_refusal(call.layer)
        return super().run(call, function, reads)


@register_rule(keras.layers.RMSNormalization)
class RMSNormalizationRule(Normalization):
    """RMS normalization, with a scale only."""

    formula = r"$\sum \delta z$"
    norms_without_gradients = "no; they are small"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return RuleCase(functools.partial(layer, axis=pick([-1, [1, 2]])), (4, 6))

    disabled: Mapping[str, Any] = {"scale": None}

    def scale(self, layer: keras.layers.Layer) -> keras.Variable:
        return layer.scale

    def offset(self, layer: keras.layers.Layer) -> None:
        return None


def batch_statistics_refusal(layer: keras.layers.BatchNormalization) -> ValueError:
    """The error for batch normalization in training."""
    return ValueError(
        f"{layer.name!r} normalizes each example by the statistics of its batch, so an example has no gradient of its "
        "own. Use keras.layers.GroupNormalization in its place, or freeze it: layer.trainable = False."
    )
