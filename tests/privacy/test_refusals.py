"""What would break the promise is refused, with the way out."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracles.private_updates import CLASSES, FEATURES, cross_entropy, perceptron, some_data

from keras_paragrad import AccumulatingOptimizer, microbatch
from keras_paragrad.extras import MissingExtraError
from keras_paragrad.privacy import AdaptiveClip, make_private
from keras_paragrad.privacy.clipping import PrivateGradients

GIVEN = {"clip_norm": 1.0, "expected_batch_size": 15, "delta": 1e-3, "noise_multiplier": 1.0}


def private_of(model=None, **options):
    return make_private(model or perceptron(), **{**GIVEN, **options})


def fitted(private, loss=None, optimizer="sgd", data=None, **fit):
    private.compile(optimizer, loss or cross_entropy(), run_eagerly=True)
    return private.fit(*(data or some_data()), verbose=0, **fit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "`clip_norm` is 0, and must be a finite number above 0"),
        ({"clip_norm": "per layer"}, "`clip_norm` is 'per layer', and must be a positive number"),
        ({"clip_norm": "per-layer"}, "Write clip_norm='per_layer'"),
        ({"clip_norm": {"(": 1.0}}, "regular expressions .*unterminated subpattern"),
        ({"delta": 0}, "`delta` is 0"),
        ({"expected_batch_size": 1.5}, "`expected_batch_size` is 1.5"),
        ({"noise_multiplier": None}, "Either `target_epsilon` has to be given"),
        ({"target_epsilon": 3.0}, "Either `target_epsilon` has to be given"),
        ({"target_epsilon": 3.0, "noise_multiplier": None}, "`target_epsilon` is given without `epochs`"),
        ({"epochs": 3}, "`epochs` calibrates noise to a target_epsilon"),
        ({"examples": 2000}, "so whole examples out of 2000 may be released. Write make_private\\(..., delta=5e-05"),
        ({"accountant": "moments"}, "`accountant` is 'moments'"),
        ({"seed": -1}, "`seed` is -1"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        private_of(**options)


def test_adaptive_clip():
    with pytest.raises(ValueError, match="`quantile` is 1"):
        AdaptiveClip(quantile=1)
    private = private_of(clip_norm=AdaptiveClip(count_noise=0.4))
    with pytest.raises(ValueError, match="`count_noise` is 0.4, and must be above half"):
        fitted(private)


@pytest.mark.parametrize(
    ("clip_norm", "message"),
    [
        ({"hidden": 1.0}, "clip_norm has no bound for the layer '.*out'"),
        (
            {"hiden": 1.0, ".*": 1.0},
            r"\['hiden'\] in clip_norm match no layer .* The layers with trainable weights are .*hidden",
        ),
        ({".*": 1.0, "hidden": 1.0}, r"The regular expressions \['hidden'\] in clip_norm match no layer"),
    ],
)
def test_bounds_by_name(clip_norm, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(clip_norm=clip_norm))


class HiddenNetwork(keras.Model):
    def __init__(self):
        super().__init__(name="hidden_network")
        self.hidden, self.out = layers.Dense(3, name="hidden"), layers.Dense(2, name="out")

    def call(self, inputs):
        return self.out(self.hidden(inputs))


def test_a_pattern_for_layers_does_not_match_the_models_name():
    made = [keras.Sequential([layers.Dense(3, name="hidden"), layers.Dense(2, name="out")], name="hidden_network")]
    for model in (*made, HiddenNetwork()):
        model(np.zeros((1, 4), "float32"))
        gradients = PrivateGradients(model, {"hidden": 0.5, ".*": 1.0}, 4)
        assert [(layer.name, bound) for layer, bound in gradients.bounds()] == [("hidden", 0.5), ("out", 1.0)]


class Mixing(layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0, keepdims=True)


class Adding(layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return inputs


class Keeping(layers.Layer):
    """Remembers the largest input."""

    def build(self, shape):
        self.largest = self.add_weight(name="largest", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(inputs)))
        return inputs


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred)


def with_layer(*inserted, kind=keras.Sequential):
    return kind([keras.Input((FEATURES,)), *inserted, layers.Dense(CLASSES)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: with_layer(layers.BatchNormalization()), r"Write make_private\(fix_batch_norm\(model\)"),
        (lambda: with_layer(kind=OwnLoss), "has its own compute_loss"),
        (
            lambda: keras.Sequential(
                [keras.Input((4, 3), batch_size=2), layers.LSTM(2, stateful=True), layers.Dense(CLASSES)]
            ),
            "stateful=True",
        ),
        (lambda: "model", "`model` is 'model'"),
    ],
)
def test_models(model, message):
    with pytest.raises(ValueError, match=message):
        private_of(model())


@pytest.mark.parametrize(
    ("inserted", "message"),
    [
        (Mixing, "depends on the others in the batch"),
        (Adding, "A layer adds a loss with add_loss"),
        (Keeping, "Training changes a state of keeping"),
        (lambda: layers.ActivityRegularization(0.1), "activity regularizer"),
    ],
)
def test_layers(inserted, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(with_layer(inserted())))


def test_masked_means():
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(5, 4, mask_zero=True), layers.Dense(CLASSES)])
    tokens = np.random.default_rng(0).integers(5, size=(60, 6))
    targets = tokens % CLASSES
    with pytest.raises(ValueError, match="masks of the whole batch.*reduction='sum'"):
        fitted(private_of(model), data=(tokens, targets))
    fitted(private_of(model), cross_entropy(reduction="sum"), data=(tokens, targets))


class Pairwise(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_pred[:, None] - y_pred[None]) ** 2, (1, 2))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda: cross_entropy(reduction="mean_with_sample_weight"), "Write reduction='sum_over_batch_size'"),
        (lambda: cross_entropy(reduction="none"), "A loss isn't reduced"),
        (Pairwise, "depends on the others in the batch"),
    ],
)
def test_losses(loss, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(), loss())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "Use the policy 'mixed_bfloat16'"),
        (lambda: AccumulatingOptimizer("sgd", 4), "an update of a private model is one step"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=4), "Remove that argument"),
    ],
)
def test_optimizers(optimizer, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(), optimizer=optimizer())


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        ({"batch_size": 32}, r"Leave batch_size out, or write make_private\(..., expected_batch_size=32\)"),
        ({"validation_split": 0.1}, "`validation_split` would show losses of private rows"),
        ({"shuffle": False}, "examples are drawn at random"),
        ({"steps_per_epoch": 3}, "Leave it out, and state epochs"),
        ({"callbacks": [keras.callbacks.EarlyStopping("loss")]}, "EarlyStopping goes by 'loss'.*monitor='val_loss'"),
        ({"callbacks": keras.callbacks.ReduceLROnPlateau("accuracy")}, "ReduceLROnPlateau goes by 'accuracy'"),
        (
            {"callbacks": keras.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True)},
            "ModelCheckpoint goes by 'loss'",
        ),
        ({"callbacks": keras.callbacks.CallbackList([keras.callbacks.EarlyStopping("loss")])}, "EarlyStopping goes by"),
        ({"callbacks": [keras.callbacks.TerminateOnNaN()]}, "TerminateOnNaN ends training by the loss of private rows"),
    ],
)
def test_arguments_of_fit(fit, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(), **fit)


class ClippingFirst(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(10 * gradient, variable) for gradient, variable in grads_and_vars])


class AfterNoise(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(keras.ops.sign(gradient), variable, learning_rate)


def test_optimizers_that_change_gradients_before_the_noise():
    with pytest.raises(ValueError, match="ClippingFirst has its own apply_gradients"):
        fitted(private_of(), optimizer=ClippingFirst(0.1))
    fitted(private_of(), optimizer=AfterNoise(0.1))
    fitted(private_of(), optimizer=keras.optimizers.SGD(0.1, clipnorm=1.0))


def whole_mean(y_true, y_pred):
    return keras.ops.mean((keras.ops.cast(y_true, "float32") - y_pred[:, 0]) ** 2)


def test_a_loss_of_the_whole_batch_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="let each loss return one value per example") as raised:
        fitted(private_of(), whole_mean)
    assert "weighting" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)).batch(8), y), "targets and sample weights in its"),
        (
            lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)),),
            r"shapes \(5,\), \(\), which don't belong to a batch",
        ),
    ],
)
def test_data(data, message):
    with pytest.raises(ValueError, match=message):
        fitted(private_of(), data=data(*some_data()))


def test_delta_is_compared_with_the_size_of_the_data():
    with pytest.raises(
        ValueError, match=r"so whole examples out of 60 may be released. Write make_private\(..., delta=0.002"
    ):
        fitted(private_of(delta=0.5))


def test_callbacks_that_go_by_public_rows_are_allowed():
    stops = keras.callbacks.EarlyStopping("val_loss", patience=5)
    fitted(private_of(), callbacks=[stops], validation_data=some_data(seed=1))


def test_batches_are_cut_by_make_private_alone():
    private = private_of()
    with microbatch(private, 8), pytest.raises(ValueError, match=r"make_private\(..., physical_batch_size=...\)"):
        fitted(private)


def test_steps_outside_of_fit():
    private = private_of()
    private.compile("sgd", cross_entropy())
    with pytest.raises(ValueError, match="random samples only"):
        private.train_on_batch(*some_data())
    fitted(private)
    with pytest.raises(ValueError, match="belongs to a private model, whose steps have to run in its own fit"):
        private.train_step(some_data())
    assert private.privacy.updates == 4


def test_targets_are_needed():
    with pytest.raises(ValueError, match="There are no targets"):
        fitted(private_of(), data=(tf.zeros((60, FEATURES)),))


def test_no_update_is_made_that_could_not_be_accounted_for(monkeypatch):
    """Of a model that was loaded where dp-accounting is not installed."""
    private = private_of()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match="A private model.s fit needs dp_accounting"):
        fitted(private)
    assert private.privacy.updates == 0
