"""PReLU: a slope for negative inputs."""

import functools

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Pick, Rule, RuleCase, register_rule


@register_rule(keras.layers.PReLU)
class PReLURule(Rule):
    """y = max(x, 0) + alpha * min(x, 0), so that the gradient is d * min(x, 0), summed over the axes that share one."""

    formula = r"$\sum \delta \min(x, 0)$"

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        return RuleCase(functools.partial(layer, shared_axes=pick([None, [1], [1, 2]])), (4, 3, 2))

    def gradients(self, call: Call) -> list[tf.Tensor]:
        gradient, axes = call.cotangent * tf.minimum(call.input, 0), call.layer.shared_axes
        return [tf.reduce_sum(gradient, axes, keepdims=True) if axes else gradient]
