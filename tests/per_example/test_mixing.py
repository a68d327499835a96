"""Models and losses that mix the examples of a batch are found on made-up rows, and so are states of examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from sample_models import mixing
from sample_models.mixing import Updating

from keras_paragrad import per_example_norms, wrap
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.per_example.mixing_layers import find_mixing_layer
from keras_paragrad.per_example.units import mixes_examples
from keras_paragrad.privacy.clipping import layers_storing_examples

X, Y = np.random.default_rng(0).normal(size=(6, 4)).astype("float32"), np.array([0, 1] * 3)


class Unseeded(layers.Layer):
    def call(self, inputs, training=False):
        return inputs + tf.random.normal(tf.shape(inputs)) if training else inputs


def sequential(*within, name=None):
    kernel, probabilities = layers.Dense(3), layers.Dense(2, activation="softmax")
    return keras.Sequential([keras.Input((4,)), kernel, *within, probabilities], name=name)


def recommender():
    model = mixing.Recommender()
    model(np.zeros((2, 2), "int32"))
    return model


def values(variables):
    return [ops.convert_to_numpy(each) for each in variables]


def test_gradients_of_examples_are_refused():
    model = sequential(mixing.InTraining(name="mixes"))
    assert per_example_norms(model, X[:3], np.zeros((3, 2), "float32"), "mse").shape == (3,)
    says = "of 'mixes' for one example"
    with pytest.raises(ValueError, match=f"The output {says}"):
        per_example_norms(model, X[:3], np.zeros((3, 2), "float32"), "mse", training=True)
    for make, loss in ((lambda: model, "sparse_categorical_crossentropy"), (sequential, keras.losses.Circle())):
        wrapped = wrap(make())
        wrapped.compile("sgd", loss)
        with pytest.raises(ValueError, match=f"The (output {says}|value of the loss .*) depends on the others"):
            wrapped.fit(X, Y, verbose=0)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: sequential(layers.Dropout(0.5), layers.BatchNormalization(), layers.GaussianNoise(1.0)), None),
        (lambda: sequential(Unseeded()), None),
        (lambda: sequential(mixing.Shifted()), None),
        (lambda: sequential(layers.LayerNormalization(), layers.SpectralNormalization(layers.Dense(3))), None),
        (lambda: sequential(mixing.MinusBatchMean(name="mixes")), "mixes"),
        (lambda: sequential(layers.Dropout(0.5), mixing.OverBatch(name="mixes")), "mixes"),
        (lambda: sequential(mixing.InTraining(name="mixes")), "mixes"),
        (lambda: sequential(layers.Dropout(0.5), mixing.ByNumberOfRows(name="mixes")), "mixes"),
        (lambda: sequential(mixing.InItsGradient(), name="whole"), "whole"),
        (lambda: sequential(mixing.NormalizesItsGradient(), name="whole"), "whole"),
        (lambda: sequential(Unseeded(), mixing.OverBatch(name="mixes")), "mixes"),
        # The last layer lets nothing through.
        (lambda: sequential(mixing.OverBatch(name="mixes"), layers.Dense(2, kernel_initializer="zeros")), "mixes"),
        (recommender, "recommender"),
    ],
)
def test_layers(make, found):
    model = make()
    batch = tf.zeros((4, 2), "int32") if isinstance(model, mixing.Recommender) else tf.zeros((4, 4))
    before = values(model.variables)
    assert find_mixing_layer(model, batch) == found
    np.testing.assert_equal(values(model.variables), before)
    assert not model.losses


class Center(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.center = keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.center.assign(ops.mean(y_pred))
        return ops.mean(ops.square(y_pred - self.center), -1)


@pytest.mark.parametrize(
    ("loss", "targets", "found"),
    [
        (keras.losses.Circle(), ((4,), "int32"), True),
        (keras.losses.Circle(), ((4, 1), "float32"), True),
        (mixing.InBatchNegatives(), ((4, 5), "float32"), True),
        (mixing.OfPairs(), ((4, 5), "float32"), True),
        (mixing.OfNeighbours(), ((4, 5), "float32"), True),
        (mixing.DividesItself(), ((4, 5), "float32"), True),
        (Center(), ((4, 5), "float32"), True),
        (mixing.OfElements(), ((4, 5), "float32"), True),
        (keras.losses.MeanSquaredError(), ((4, 5), "float32"), False),
        (keras.losses.CategoricalCrossentropy(from_logits=True), ((4, 5), "float32"), False),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), ((4,), "int32"), False),
        (keras.losses.Dice(axis=-1), ((4, 5), "float32"), False),
    ],
)
def test_losses(loss, targets, found):
    assert mixes_examples(LossTerm(loss, tf.zeros(*targets), tf.zeros((4, 5)), None)) == found


def test_numbers_that_are_not_finite_are_not_compared(caplog):
    """NaN matches NaN, whatever a loss or a layer computes."""

    class OfNegatives(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.mean(y_pred) + ops.log(-1 - ops.abs(y_pred[:, 0]))

    assert not mixes_examples(LossTerm(OfNegatives(), tf.zeros([4, 1]), tf.zeros([4, 2]), None))
    assert "the losses are not finite on synthetic rows" in caplog.text
    mixes = layers.Lambda(lambda x: ops.mean(x) + ops.log(-1 - ops.abs(x)))
    mixes.build((None, 3))
    assert find_mixing_layer(mixes, (tf.zeros([4, 3]),)) is None
    assert "the outputs are not finite on synthetic rows" in caplog.text


@pytest.mark.parametrize(
    ("make", "stores"),
    [
        (lambda: Updating(mixing.slow_mean, start=keras.initializers.Constant(50.0), name="updating"), True),
        # Of the maximum, only large numbers show it.
        (lambda: Updating(mixing.largest, start=keras.initializers.Constant(9.0), name="updating"), True),
        (lambda: mixing.Codebook(name="updating"), True),
        (lambda: Updating(lambda s, x: s + 1), False),
        (lambda: Updating(mixing.power_iteration, start="ones", shape=(3,)), False),
        (layers.BatchNormalization, False),
        (Unseeded, False),
    ],
)
def test_layers_that_store_examples(make, stores):
    model = sequential(make())
    before = values(model.variables)
    assert layers_storing_examples(model, tf.zeros((4, 4))) == (["updating"] if stores else [])
    np.testing.assert_equal(values(model.variables), before)
