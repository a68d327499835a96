"""`PerExampleGradients`: a layer that knows the gradient of every example it was trained on."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.layers import is_symbolic, outermost_layer
from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.results import Rows, Total
from keras_paragrad.per_example.scaling import Divisor

QUANTITIES = ("norms", "gradients", "second_moment")


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PerExampleGradients(keras.layers.Wrapper):
    def __init__(self, layer, quantity="norms", clip_norm=None, transform=None, *, capacity=None, **kwargs):
        super().__init__(layer, **{"dtype": "float32", "autocast": False, **kwargs})
        self.quantity = quantity
        self.clip_norm = clip_norm
        self.transform = transform
        self.capacity = capacity
        self.__dict__["_results"] = None
        self.__dict__["_answered"] = None

    def build(self, input_shape=None):
        super().build(input_shape)
        self._prepare()

    def _prepare(self):
        with tf.init_scope():
            self.__dict__["_results"] = {"norms": Rows([], self.capacity)}

    def call(self, inputs, *args, **kwargs):
        if is_symbolic() or tf.distribute.in_cross_replica_context():
            return self.layer(inputs, *args, **kwargs)
        variables = self.layer.trainable_variables
        divisor = Divisor()

        @tf.custom_gradient
        def finish(anchor, *weights):
            def backward(_):
                return tf.zeros([]), *self._backward(capture, divisor)
            return tf.identity(anchor), backward

        anchor = finish(tf.zeros([]), *(tf.convert_to_tensor(v.value) for v in variables))
        capture = Capture(self.layer, anchor, detached=self.clip_norm is not None)
        return capture(inputs, *args, **kwargs)

    def _backward(self, capture, divisor):
        divisor.close()
        variables = self.layer.trainable_variables
        q = Quantities(capture.recorded, variables)
        factor = divisor.factor(tf.cast(q.batch, "float32"))
        norms = tf.sqrt(q.squared_norms()) * factor
        self._results["norms"].assign(norms)
        if self.clip_norm is None:
            return [None] * len(variables)
        w = tf.minimum(1.0, self.clip_norm * tf.math.reciprocal_no_nan(norms))
        return q.weighted_sums(w)

    @property
    def norms(self):
        return self._results["norms"].numpy()
