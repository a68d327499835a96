"""What has no per-example gradients is refused, with what to write instead."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import some_inputs
from sample_models.own_layers import TokenAndPosition

from keras_paragrad import PerExampleGradients, per_example_gradients, wrap


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"layer": "dense"}, r"Write layer=keras.layers.Dense\(10\)"),
        ({"quantity": "norm"}, "'norms', 'gradients' or 'second_moment'"),
        ({"clip_norm": 0}, "clip_norm=1.0"),
        ({"clip_norm": "1"}, "clip_norm=1.0"),
        ({"clip_norm": "much"}, "clip_norm=1.0"),
        ({"clip_norm": True}, "clip_norm=1.0"),
        ({"transform": 2.0}, "transform=lambda norms"),
        ({"transform": abs, "clip_norm": 1.0}, "Pass only one"),
        ({"capacity": 0}, "capacity=256"),
        ({"capacity": 2.5}, "capacity=256"),
    ],
)
def test_arguments(arguments, says):
    arguments = {"layer": layers.Dense(1), **arguments}
    with pytest.raises(ValueError, match=says):
        PerExampleGradients(**arguments)


def train(model, loss="mse", shape=(4, 3), targets=(4, 2), **options):
    wrapped = wrap(model, **options)
    wrapped.compile("sgd", loss)
    wrapped.fit(some_inputs(shape), np.ones(targets), batch_size=4, verbose=0)
    return wrapped


@pytest.mark.parametrize("weights", [True, False])
def test_batch_normalization_in_training(weights):
    normalization = layers.BatchNormalization(center=weights, scale=weights)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), normalization])
    with pytest.raises(ValueError, match=r"GroupNormalization in its place, or freeze it: layer.trainable = False"):
        train(model)
    normalization.trainable = False
    assert train(model).per_example.count == 4


@pytest.mark.long
def test_what_was_refused_is_looked_at_again():
    tokens = keras.Input((4,), dtype="int32")
    embed, normalization = TokenAndPosition(4), layers.BatchNormalization()
    model = keras.Model(tokens, layers.Dense(2)(layers.Flatten()(normalization(embed(tokens)))))
    wrapped = wrap(model)
    wrapped.compile("sgd", "mse")
    x, y = some_inputs((4, 4), 11), np.ones((4, 2), "float32")
    with pytest.raises(ValueError, match="GroupNormalization"):
        wrapped.fit(x, y, verbose=0)
    normalization.trainable = False
    wrapped.compile(keras.optimizers.SGD(0.0), "mse")
    # As many examples as positions, which the positions' embedding must not be taken for.
    wrapped.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    theirs = example_gradients(model, x, lambda y_pred, y: ops.mean(ops.square(y_pred - y)), y)
    np.testing.assert_allclose(wrapped.per_example.norms, norms_of(theirs), rtol=1e-5)


def test_batch_normalization_that_is_called_to_predict():
    class FineTuned(keras.Model):
        def __init__(self):
            super().__init__()
            self.base = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization()])

        def call(self, inputs):
            return self.base(inputs, training=False)

    assert train(FineTuned()).per_example.count == 4


def test_a_dropout_s_mask_that_a_batch_shares():
    model = keras.Sequential([keras.Input((3,)), layers.Dropout(0.5, noise_shape=(1, 3)), layers.Dense(2)])
    with pytest.raises(ValueError, match=r"noise_shape=\(None, 3\)"):
        train(model)


def test_a_layer_that_is_called_twice():
    x = keras.Input((3,))
    layer = PerExampleGradients(layers.Dense(3))
    model = keras.Model(x, layers.Dense(2)(layer(layer(x))))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"called more than once in a step.*keras_paragrad.wrap\(model\)"):
        model.fit(some_inputs((4, 3)), np.ones((4, 2)), verbose=0)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_layer_that_is_called_twice_eagerly(run_eagerly):
    x = keras.Input((3,))
    layer = PerExampleGradients(layers.Dense(3))
    model = keras.Model(x, layer(layer(x)))
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="called more than once in a step"):
        model.fit(some_inputs((4, 3)), np.ones((4, 3)), verbose=0)


class InBatchNegatives(keras.losses.Loss):
    def call(self, y_true, y_pred):
        scores = ops.matmul(y_pred, ops.transpose(y_true))
        return -ops.diagonal(ops.log_softmax(scores))


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (InBatchNegatives(), "for one example depends on the others"),
        (keras.losses.Circle(), "for one example depends on the others"),
        (keras.losses.Dice(), "one number for the whole batch"),
        (lambda y_true, y_pred: ops.mean(ops.square(y_true - y_pred)), "one number for the whole batch"),
        (OwnCall(), "overrides __call__"),
    ],
)
def test_losses_that_are_no_sums_over_examples(loss, says):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    targets = (4,) if isinstance(loss, keras.losses.Circle) else (4, 2)
    with pytest.raises(ValueError, match=says):
        train(model, loss, targets=targets)
    with pytest.raises(ValueError, match=says):
        per_example_gradients(model, some_inputs((4, 3)), np.ones(targets, "float32"), loss)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        "mae",
        "huber",
        "binary_crossentropy",
        "kl_divergence",
        "cosine_similarity",
        "hinge",
        keras.losses.Dice(axis=-1),
    ],
    ids=lambda loss: loss if isinstance(loss, str) else loss.name,
)
def test_losses_that_are(loss):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, activation="sigmoid")])
    assert train(model, loss).per_example.norms.shape == (4,)


def test_outputs_of_different_reductions():
    x = keras.Input((3,))
    model = wrap(keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)]))
    model.compile("sgd", [keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError(reduction="sum")])
    with pytest.raises(ValueError, match="Use reduction='sum_over_batch_size' for all of them"):
        model.fit(some_inputs((4, 3)), [np.ones((4, 2))] * 2, verbose=0)


def test_a_transform_of_another_shape():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    with pytest.raises(ValueError, match="one weight per norm"):
        train(model, transform=ops.sum)


def test_results_that_are_not_kept():
    layer = PerExampleGradients(layers.Dense(2))
    with pytest.raises(ValueError, match="quantity='gradients'"):
        _ = layer.gradients
    with pytest.raises(ValueError, match="before the layer is built"):
        _ = layer.norms
    assert layer.count == 0


def test_gradients_in_a_compiled_step_want_a_capacity():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    x, y = some_inputs((10, 3)), np.ones((10, 2))
    wrapped = wrap(model, quantity="gradients")
    wrapped.compile("sgd", "mse")
    assert not wrapped.jit_compile
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        wrapped.compile("sgd", "mse", jit_compile=True)
    wrapped = wrap(model, quantity="gradients", capacity=4)
    wrapped.compile("sgd", "mse", jit_compile=True)
    wrapped.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert [gradient.shape for gradient in wrapped.per_example.gradients] == [(2, 3, 2), (2, 2)]
    wrapped.fit(x, y, batch_size=10, verbose=0)
    with pytest.raises(ValueError, match="capacity=10"):
        _ = wrapped.per_example.gradients


def test_gradients_in_a_loop_compiled_by_xla_want_a_capacity():
    layer = PerExampleGradients(layers.Dense(2), quantity="gradients")
    x = some_inputs((10, 3))

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x))
        return tape.gradient(loss, layer.trainable_variables[0].value)

    with pytest.raises(ValueError, match="capacity=256"):
        step()


def test_a_stateful_layer():
    model = keras.Sequential([keras.Input((3, 2), batch_size=4), layers.LSTM(2, stateful=True)])
    with pytest.raises(ValueError, match="stateful=False"):
        train(model, shape=(4, 3, 2))
