"""The sum of the examples' gradients is the plain gradient, or the layer is refused by name."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import example_gradients, gradient_error, norms_of
from sample_models.drawn_layers import some_inputs

from keras_paragrad import PerExampleGradients, per_example_gradients, wrap
from keras_paragrad.per_example import Rule, register_rule
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.rule import _RULES

X, Y = some_inputs((6, 4)), some_inputs((6, 1))


class Slopes(layers.Layer):
    """Differentiates a layer of its own with respect to its input, in reverse or in forward mode."""

    def __init__(self, forward=False, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.forward = layers.Dense(3, activation="tanh"), forward

    def call(self, inputs):
        if self.forward:
            with tf.autodiff.ForwardAccumulator(inputs, tf.ones_like(inputs)) as forward:
                outputs = self.inner(inputs)
            return outputs + forward.jvp(outputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = self.inner(inputs)
        return ops.concatenate([outputs, tape.gradient(outputs, inputs)], -1)


class ClippedWeights(layers.Layer):
    """Clips its weights when it trains."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 3))

    def call(self, inputs, training=False):
        if training:
            self.kernel.assign(ops.clip(self.kernel, -0.1, 0.1))
        return ops.tanh(inputs @ self.kernel)


class Setting(layers.Layer):
    """Assigns to a weight of a layer in it, without reading it."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, inputs, training=False):
        if training and self.inner.built:
            self.inner.kernel.assign(ops.full(self.inner.kernel.shape, 0.3))
        return self.inner(inputs)


class Rematerialized(layers.Layer):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = layers.Dense(3, activation="tanh", name="hidden"), how

    def call(self, inputs):
        if not self.inner.built:
            self.inner.build(inputs.shape)
        return self.how(self.inner)(inputs)


def scoped(layer, mode):
    with keras.RematScope(mode=mode):
        return layer()


def model_of(layer, last="glorot_uniform"):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), layer(), layers.Dense(1, kernel_initializer=last)])


def trained(model, on=None):
    on = model if on is None else on
    on.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    on.train_on_batch(X, Y)
    on.train_on_batch(X, Y)
    return model.get_weights()


RIGHT = {
    "spectral normalization": lambda: layers.SpectralNormalization(layers.Dense(3, activation="tanh")),
    "weights set by the layer around": Setting,
    "slopes": Slopes,
    "slopes in forward mode": lambda: Slopes(forward=True),
    "weights clipped in a layer": ClippedWeights,
}


@pytest.mark.few(0, "spectral normalization")
@pytest.mark.parametrize("layer", RIGHT)
def test_unclipped_updates_are_the_plain_ones(layer):
    plain = trained(model_of(RIGHT[layer]))
    model = model_of(RIGHT[layer])
    ours = trained(model, wrap(model, clip_norm=1e9))
    assert max(np.abs(a - b).max() for a, b in zip(ours, plain, strict=True)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", ["slopes", "slopes in forward mode"])
def test_gradients_of_layers_that_differentiate(layer):
    model = model_of(RIGHT[layer])
    theirs = example_gradients(model, X, lambda y_pred, y: tf.reduce_mean((y_pred - y) ** 2), Y)
    assert gradient_error(per_example_gradients(model, X, Y, "mse"), theirs) < 1e-6


def test_one_layer_that_differentiates():
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((4,)), layers.Dense(4), Slopes(), layers.Dense(1)])
    clipped = keras.Sequential(
        [*plain.layers[:1], PerExampleGradients(plain.layers[1], clip_norm=1e9), plain.layers[2]]
    )
    before = plain.get_weights()
    theirs = trained(plain)
    plain.set_weights(before)
    ours = trained(plain, clipped)
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_spectral_normalization_for_each_example():
    model = model_of(RIGHT["spectral normalization"])
    before = model.get_weights()

    def loss(y_pred, y):
        return tf.reduce_mean((y_pred - y) ** 2)

    gradients = []
    for row in range(len(X)):
        model.set_weights(before)
        with tf.GradientTape() as tape:
            value = loss(model(X[row : row + 1], training=True), Y[row : row + 1])
        gradients.append(tape.gradient(value, [weight.value for weight in model.trainable_variables]))
    theirs = [np.stack(parts) for parts in zip(*gradients, strict=True)]
    model.set_weights(before)
    wrapped = wrap(model)
    wrapped.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    wrapped.train_on_batch(X, Y)
    np.testing.assert_allclose(wrapped.per_example.norms, norms_of(theirs), rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "layer"),
    [
        ("full", lambda: keras.Sequential([layers.Reshape((4, 1)), layers.GRU(3)])),
        ("activations", lambda: layers.Dense(3, activation="tanh")),
    ],
)
def test_a_scope_of_rematerialization(mode, layer):
    plain, scope = model_of(layer), model_of(lambda: scoped(layer, mode))
    theirs = example_gradients(plain, X, lambda y_pred, y: tf.reduce_mean((y_pred - y) ** 2), Y)
    assert gradient_error(per_example_gradients(scope, X, Y, "mse"), theirs) < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [keras.remat, tf.recompute_grad])
def test_rematerialized_layers_are_refused_by_name(how):
    # A last layer of zeros hides the gradients of the layers before it.
    model = model_of(lambda: Rematerialized(how), last="zeros")
    with pytest.raises(ValueError, match="'hidden' don't sum to its gradient in a plain step: .* call it directly"):
        per_example_gradients(model, X, Y, "mse")
    wrapped = wrap(model, clip_norm=1.0)
    wrapped.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="'hidden' don't sum"):
        wrapped.train_on_batch(X, Y)


def test_a_wrong_rule_is_refused():
    class Scale(layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")

        def call(self, inputs):
            return inputs * self.scale

    @register_rule(Scale)
    class Forgets(Rule):
        def gradients(self, call):
            return [call.cotangent]

    try:
        with pytest.raises(ValueError, match="'scale' don't sum .* Correct the rule Forgets"):
            per_example_gradients(model_of(lambda: Scale(name="scale")), X, Y, "mse")
    finally:
        del _RULES[Scale]


def test_a_loss_that_reads_a_weight_is_refused():
    model = model_of(lambda: layers.Dense(3))

    def penalized(y, y_pred):
        return ops.mean((y - y_pred) ** 2, -1) + ops.sum(model.layers[0].kernel ** 2)

    with pytest.raises(ValueError, match="The loss 'penalized' reads the weight"):
        per_example_gradients(model, X, Y, penalized)
    wrapped = wrap(model)
    wrapped.compile("sgd", penalized, run_eagerly=True)
    with pytest.raises(ValueError, match="The loss 'penalized' reads the weight"):
        wrapped.train_on_batch(X, Y)


class Noisy(layers.Layer):
    """Draws numbers with TensorFlow's global generator, or with a seed of Keras's, and counts its calls."""

    def __init__(self, seeded):
        super().__init__()
        self.inner, self.noise, self.calls = layers.Dense(3), layers.Dropout(0.5), 0
        self.seeded = seeded
        self.counter = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        self.calls += 1
        self.counter.assign_add(1.0)
        outputs = self.inner(inputs)
        return self.noise(outputs, training=training) if self.seeded else outputs * tf.random.uniform([3])


@pytest.mark.parametrize("seeded", [True, False])
def test_random_layers_are_not_refused_and_nothing_is_left_behind(seeded, caplog):
    model = model_of(lambda: Noisy(seeded))
    model(X)
    held = [id(variable.value) for variable in model.variables]
    before = [*map(keras.ops.convert_to_numpy, model.variables), model.layers[0].calls]
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        units_for(model, (tf.constant(X),), {"training": True})
    assert ("not checked" in caplog.text) is not seeded
    after = [*map(keras.ops.convert_to_numpy, model.variables), model.layers[0].calls]
    assert [id(variable.value) for variable in model.variables] == held
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
