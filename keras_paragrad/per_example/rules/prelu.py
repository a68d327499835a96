"""PReLU: a slope for negative inputs."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.registry import Call, Rule, register_rule


@register_rule(keras.layers.PReLU)
class PReLURule(Rule):
    """y = max(x, 0) + alpha * min(x, 0), so that the gradient is d * min(x, 0), summed over the axes that share one."""

    def gradients(self, call: Call) -> list[tf.Tensor]:
        layer: Any = call.layer
        gradient = call.cotangent * tf.minimum(call.input, 0)
        return [tf.reduce_sum(gradient, layer.shared_axes, keepdims=True) if layer.shared_axes else gradient]
