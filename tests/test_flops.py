"""Counted operations, against the formula for each layer."""

import keras
import pytest
import tensorflow as tf
from keras import layers

from keras_paragrad import recompute
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


class Again(layers.Layer):
    """Computes a layer by `keras.remat`, which runs it a second time in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.run = layer, keras.remat(layer.__call__)

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.run(x)


class Twice(layers.Layer):
    """Multiplies with a product of weights that nothing reads, and with a kernel whose gradient it writes itself."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        @tf.custom_gradient
        def product(x, kernel):
            return x @ kernel, lambda d: (d @ tf.transpose(kernel), tf.transpose(x) @ d)

        x @ (self.kernel @ self.kernel)
        return product(x, tf.convert_to_tensor(self.kernel))


def flops(make, change=lambda model: None):
    model = keras.Sequential([keras.Input((6,)), *make(), layers.Dense(1)])
    model.compile("sgd", "mae")
    change(model)
    return flops_of(gradient_graph(model, (tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])), ROWS))


def blocks():
    return [layers.Dense(6, "tanh"), keras.Sequential([layers.Dense(6, "tanh"), layers.Dropout(0.5), layers.Dense(6)])]


# `square`, `narrow`: the products with 6 x 6 and with 6 x 1 numbers that an example takes.
@pytest.mark.parametrize(
    ("make", "change", "square", "narrow"),
    [
        (blocks, lambda model: None, 3 + 2 * 2 + 1, 3),
        (blocks, lambda model: setattr(model.layers[0], "trainable", False), 3 + 2 * 1 + 1, 3),
        (blocks, lambda model: [setattr(layer, "trainable", False) for layer in model.layers[:2]], 3, 2),
        (lambda: [*map(Again, blocks())], lambda model: None, 3 + 2 * 2 + 1, 3),
        (blocks, lambda model: recompute(model, every=1), 3 + 2 * 2 + 1, 3),
        (lambda: [layers.Dense(6), Twice()], lambda model: None, 2 + 2 + 1, 3),
    ],
    ids=["nothing frozen", "first frozen", "all frozen but the head", "keras.remat", "recompute", "custom gradient"],
)
def test_what_the_gradients_need_counts_once(make, change, square, narrow):
    assert flops(make, change) == 2 * ROWS * (36 * square + 6 * narrow)


class Student(keras.Sequential):
    """Has a teacher, which its step calls as well."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - self.teacher(data[0])) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_train_step_of_your_own_is_counted_itself():
    model = Student([keras.Input((6,)), layers.Dense(1)])
    model.teacher = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.Dense(1)])
    model.compile("adam")
    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    assert flops_of(gradient_graph(model, spec, ROWS)) == 2 * ROWS * (6 + 6 + 36 + 6)


def test_what_is_not_known():
    unknown = tf.function(tf.matmul).get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([4, 2]))
    assert flops_of(unknown.graph) is None

    def loop(x):
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 1, lambda y: [y @ y], [x])

    assert flops_of(tf.function(loop).get_concrete_function(tf.TensorSpec([2, 2])).graph) is None
