"""Counted operations, against the formula for each layer."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from keras_paragrad.engine.telemetry.train_functions import gradient_graph
from keras_paragrad.flops import flops_of

ROWS = 3
# The layer, its input's shape, and the multiplications in its forward pass for one example.
LAYERS = {
    "dense": (lambda: layers.Dense(4), (6,), 6 * 4),
    "dense of a sequence": (lambda: layers.Dense(4), (5, 6), 5 * 6 * 4),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (None, 4)), (5, 6), 5 * 6 * 4),
    "convolution": (lambda: layers.Conv2D(4, 3), (8, 8, 2), 6 * 6 * 4 * 9 * 2),
    "depthwise": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 2), 6 * 6 * 2 * 2 * 9),
    "three axes": (lambda: layers.Conv3D(4, 2), (4, 4, 4, 2), 27 * 4 * 8 * 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name):
    make, shape, forward = LAYERS[name]
    # The scale in front makes the layer's input need a gradient, too.
    model = keras.Sequential([keras.Input(shape), layers.Rescaling(1.0), layers.LayerNormalization(), make()])
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([None, *shape]), tf.TensorSpec([None, *model.output_shape[1:]])
    assert flops_of(gradient_graph(model, spec, ROWS)) == 2 * 3 * ROWS * forward


def test_what_is_not_known():
    unknown = tf.function(tf.matmul).get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([4, 2]))
    assert flops_of(unknown.graph) is None

    def loop(x):
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 1, lambda y: [y @ y], [x])

    assert flops_of(tf.function(loop).get_concrete_function(tf.TensorSpec([2, 2])).graph) is None
