"""Cases that were wrong once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.every_example import check
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import randomize, some_inputs

from keras_paragrad import PerExampleGradients, wrap
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.rules.embedding import FEW_LOOKUPS


class Standardized(layers.Conv2D):
    """Overrides what `call` calls."""

    def convolution_op(self, inputs, kernel):
        mean, variance = ops.moments(kernel, axes=[0, 1, 2], keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / ops.sqrt(variance + 1e-3))


def test_a_subclass_that_overrides_what_call_calls():
    model = keras.Sequential([keras.Input((6, 6, 2)), Standardized(3, 3), layers.GlobalAveragePooling2D()])
    randomize(model)
    check(model, some_inputs((3, 6, 6, 2)))


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_causal_windows_that_end_before_the_input(length):
    inputs, outputs = keras.Input((length, 2)), []
    for kernel_size, strides, dilation_rate in ((2, 2, 1), (3, 2, 1), (3, 3, 1), (3, 1, 2)):
        convolution = layers.Conv1D(2, kernel_size, strides, "causal", dilation_rate=dilation_rate)
        outputs.append(layers.Flatten()(convolution(inputs)))
    check(keras.Model(inputs, layers.Concatenate()(outputs)), some_inputs((3, length, 2)))


@pytest.mark.parametrize("length", [3, FEW_LOOKUPS + 1])
@pytest.mark.parametrize("kind", [layers.Embedding, layers.ReversibleEmbedding])
def test_words_counted_from_the_end(kind, length):
    model = keras.Sequential([keras.Input((length,), dtype="int32"), kind(5, 2)])
    randomize(model)
    check(model, np.random.default_rng(0).integers(-5, 5, (4, length)).astype("int32"))


CONVOLUTIONS = {
    "one axis": lambda: layers.Conv1D(3, 3, padding="causal"),
    "two axes": lambda: layers.Conv2D(3, 3, 2, "same"),
    "dilated": lambda: layers.Conv2D(3, (2, 3), dilation_rate=2),
    "transposed": lambda: layers.Conv2DTranspose(3, 3, 2),
    "depthwise": lambda: layers.DepthwiseConv2D(3, 2, "same"),
    "separable": lambda: layers.SeparableConv2D(3, 3, padding="same"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_inputs_of_any_size(name):
    convolution = CONVOLUTIONS[name]()
    axes = convolution.rank
    pooling = layers.GlobalAveragePooling1D() if axes == 1 else layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((*[None] * axes, 2)), convolution, pooling])
    randomize(model)
    wrapped = wrap(model, quantity="norms")
    wrapped.compile(keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError("sum"), jit_compile=False)
    for size in (7, 10):
        x, y = some_inputs((3, *range(size, size + axes), 2)), np.ones((3, model.output_shape[-1]), "float32")
        any_size = (tf.TensorSpec([*[None] * (1 + axes), 2]), tf.TensorSpec([None, None]))
        data = tf.data.Dataset.from_generator(lambda x=x, y=y: [(x, y)], output_signature=any_size)
        wrapped.fit(data, shuffle=False, verbose=0)
        expected = norms_of(example_gradients(model, x, wrapped.loss, y))
        np.testing.assert_allclose(wrapped.per_example.norms, expected, rtol=0, atol=1e-6 * expected.max())


class WithNormalization(layers.Layer):
    """Owns a weight, so that it is one unit, and normalizes within it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.normalization = layers.BatchNormalization()

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")
        self.normalization.build(input_shape)

    def call(self, inputs, training=None):
        return self.scale * self.normalization(inputs, training=training)


@pytest.mark.parametrize("make", [WithNormalization, lambda: layers.TimeDistributed(layers.BatchNormalization())])
def test_batch_normalization_within_a_unit(make):
    model = wrap(keras.Sequential([keras.Input((4, 3)), make(), layers.Flatten(), layers.Dense(1)]))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="GroupNormalization"):
        model.fit(some_inputs((4, 4, 3)), np.ones((4, 1)), verbose=0)


class Mixing(layers.Layer):
    """Takes a batch and a table that is none."""

    def build(self, inputs_shape, table_shape):
        self.scale = self.add_weight(shape=(table_shape[-1],), initializer="ones")

    def call(self, inputs, table):
        return inputs + ops.sum(ops.tanh(table * self.scale) ** 2, axis=0) * inputs


class WithTable(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.mixing = layers.Dense(3), Mixing()

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.mixing.build((None, 3), (4, 3))
        self.built = True

    def call(self, inputs):
        return self.mixing(self.dense(inputs), ops.reshape(ops.arange(12, dtype="float32"), (4, 3)) / 10)


@pytest.mark.parametrize("batch", [3, 4])
def test_an_argument_that_is_no_batch(batch):
    model = WithTable()
    model(some_inputs((batch, 2)))
    check(model, some_inputs((batch, 2)))


class InTrainingOnly(layers.Layer):
    """Reads positions in training, and not otherwise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.positions = layers.Dense(3), layers.Embedding(4, 3)

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.positions.build(())

    def call(self, inputs, training=None):
        hidden = self.dense(inputs)
        return ops.tanh(hidden + self.positions(ops.arange(4))) if training else ops.tanh(hidden)


def test_a_call_that_goes_another_way_in_training():
    model = keras.Sequential([keras.Input((4, 2)), InTrainingOnly(), layers.Flatten(), layers.Dense(1)])
    randomize(model)
    x, y = some_inputs((4, 4, 2)), np.ones((4, 1), "float32")
    layer = PerExampleGradients(model)
    found = []
    for training in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(x, training=training) - y) ** 2)
        tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        found.append(layer.norms)

    def alone(y_pred, x, y):
        return tf.reduce_mean((model(x, training=True) - y) ** 2)

    theirs = norms_of(example_gradients(model, x, alone, x, y))
    np.testing.assert_allclose(found[1], theirs, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0], theirs, rtol=1e-2)


class Fixed(keras.Model):
    """Made for batches of six."""

    def __init__(self, positions):
        super().__init__()
        self.dense, self.positions = layers.Dense(3), layers.Embedding(4, 3) if positions else None

    def build(self, input_shape):
        self.dense.build((6, 4, 2))
        if self.positions:
            self.positions.build(())
        self.built = True

    def call(self, inputs):
        hidden = self.dense(inputs)
        hidden = hidden + self.positions(ops.arange(4)) if self.positions else hidden
        return ops.sum(ops.reshape(ops.tanh(hidden), (6, 12)), axis=-1, keepdims=True)


def test_a_batch_of_one_size_only():
    x = some_inputs((6, 4, 2))
    for positions in (False, True):
        model = Fixed(positions)
        model(x)
        layer = PerExampleGradients(model)
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x))
        if positions:
            # It can't be called on one example alone, so there is no way to get at the positions' gradients.
            with pytest.raises(Exception, match="Reshape|reshape"):
                tape.gradient(loss, variables)
            continue
        tape.gradient(loss, variables)
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(x)[:, 0]
        theirs = [gradient.numpy() for gradient in tape.jacobian(outputs, variables, experimental_use_pfor=False)]
        np.testing.assert_allclose(layer.norms, norms_of(theirs), rtol=1e-5)


class OwnLoss(keras.Model):
    def __init__(self, per_example):
        super().__init__()
        self.per_example = per_example

    def build(self, input_shape):
        self.per_example.build(input_shape)
        self.built = True

    def call(self, inputs):
        return self.per_example(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y - y_pred))


def test_a_loss_that_can_t_be_seen():
    x, y = some_inputs((5, 3)), np.ones((5, 1), "float32")
    model = OwnLoss(PerExampleGradients(layers.Dense(1)))
    model.compile("sgd")
    with pytest.raises(ValueError, match="loss_reduction='sum_over_batch_size'"):
        model.fit(x, y, verbose=0)
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model = OwnLoss(PerExampleGradients(inner, loss_reduction="sum"))
    model.compile(keras.optimizers.SGD(0.0))
    model.fit(x, y, shuffle=False, verbose=0)
    theirs = norms_of(example_gradients(inner, x, lambda y_pred, y: ops.sum((y - y_pred) ** 2), y))
    np.testing.assert_allclose(model.per_example.norms, theirs, rtol=1e-5)


def test_one_within_another():
    inner = keras.Sequential([keras.Input((3,)), PerExampleGradients(layers.Dense(1))])
    with pytest.raises(ValueError, match="Remove one of the two"):
        wrap(inner)
    with pytest.raises(ValueError, match="Remove one of the two"):
        PerExampleGradients(PerExampleGradients(layers.Dense(1)))


def test_the_innermost_of_several_layers_becomes_one_unit():
    normalized = layers.SpectralNormalization(layers.Dense(2))
    model = keras.Sequential([keras.Input((3,)), keras.Sequential([normalized])])
    units = units_for(model, (tf.zeros([2, 3]),), {"training": True})
    assert [unit.layer for unit in units] in ([normalized], [normalized.layer])
