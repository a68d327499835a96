"""`per_example_gradients` and `per_example_norms`."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import example_gradients, gradient_error, norms_of
from sample_models.drawn_layers import randomize, some_inputs

from keras_paragrad import per_example_gradients, per_example_norms, wrap


def make_model():
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Dense(5, activation="tanh"),
            layers.Dropout(0.5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    randomize(model)
    return model


def data(rows=10):
    generator = np.random.default_rng(0)
    return some_inputs((rows, 6, 4)), generator.integers(0, 3, rows), generator.uniform(0, 2, rows).astype("float32")


LOSSES = {
    "a loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "a sum": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    "a function": lambda y, y_pred: keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True),
}


def own_loss(y_pred, y, weight):
    return LOSSES["a loss"](y, y_pred) * weight[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("batch_size", "jit_compile"), [(None, False), (4, False), (4, True), (100, True), (1, False)])
def test_they_are_the_loop(loss, batch_size, jit_compile):
    model, (x, y, weight) = make_model(), data()
    theirs = example_gradients(model, x, own_loss, y, weight)
    how = {"batch_size": batch_size, "jit_compile": jit_compile}
    ours = per_example_gradients(model, x, y, LOSSES[loss], weight, **how)
    assert all(gradient.dtype == np.float32 for gradient in ours)
    assert gradient_error(ours, theirs) < 1e-6
    norms = per_example_norms(model, x, y, LOSSES[loss], weight, **how)
    assert np.abs(norms - norms_of(theirs)).max() < 1e-6 * norms.max()


def test_targets_weights_and_masks_of_every_step_of_a_sequence():
    tokens = keras.Input((7,), dtype="int32")
    x = layers.Dense(4, "tanh")(layers.Embedding(6, 3, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.Dense(6)(x))
    randomize(model)
    x, y = some_inputs((5, 7), 6), some_inputs((5, 7), 5)
    weight = np.random.default_rng(1).uniform(0, 2, (5, 7)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def alone(y_pred, y, weight, mask):
        values = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_sum(values * weight * mask) / tf.maximum(tf.reduce_sum(mask), 1)

    theirs = example_gradients(model, x, alone, y, weight, (x != 0).astype("float32"))
    assert gradient_error(per_example_gradients(model, x, y, loss, weight), theirs) < 1e-6


def test_several_inputs_and_outputs():
    inputs = {name: keras.Input((4,), name=name) for name in ("left", "right")}
    hidden = layers.Dense(5, activation="tanh")(layers.Concatenate()(list(inputs.values())))
    model = keras.Model(inputs, {"class": layers.Dense(3)(hidden), "value": layers.Dense(1)(hidden)})
    randomize(model)
    x = {"left": some_inputs((6, 4)), "right": some_inputs((6, 4))[::-1].copy()}
    y = {"class": some_inputs((6,), 3), "value": some_inputs((6, 1))}
    losses = {"class": LOSSES["a loss"], "value": "mse"}
    theirs = example_gradients(
        model,
        x,
        lambda y_pred, of_class, of_value: (
            LOSSES["a loss"](of_class, y_pred["class"]) + tf.reduce_mean((y_pred["value"] - of_value) ** 2)
        ),
        y["class"],
        y["value"],
    )
    assert gradient_error(per_example_gradients(model, x, y, losses), theirs) < 1e-6


@pytest.mark.long
def test_within_a_function_of_one_s_own():
    model, (x, y, _) = make_model(), data(4)

    @tf.function
    def gradients(x, y):
        return per_example_gradients(model, x, y, LOSSES["a loss"])

    assert gradient_error(gradients(x, y), per_example_gradients(model, x, y, LOSSES["a loss"])) < 1e-6


def test_a_call_is_traced_once():
    traces = []

    class Counting(keras.losses.Loss):
        def call(self, y_true, y_pred):
            traces.append(tf.executing_eagerly())
            return ops.mean(ops.square(y_true - y_pred), axis=-1)

    model, (x, _, _) = make_model(), data(11)
    per_example_gradients(model, x, np.ones((11, 3), "float32"), Counting(), batch_size=4)
    # Once for the result, twice more to see that it is one value for each example and reads no weight, and twice on
    # made-up rows.
    assert traces.count(False) <= 5


class Scaled(keras.losses.Loss):
    factor = 1.0

    def call(self, y_true, y_pred):
        return self.factor * ops.mean(ops.square(y_true - y_pred), axis=-1)


CHANGES = {
    "a layer is removed": lambda model, loss: model.pop(),
    "a layer is added": lambda model, loss: model.add(layers.Activation("tanh")),
    "another activation": lambda model, loss: setattr(model.layers[0], "activation", keras.activations.relu),
    "an attribute of a layer": lambda model, loss: setattr(model.layers[1], "negative_slope", 0.9),
    "an attribute of an adapter": lambda model, loss: setattr(model.layers[0], "lora_alpha", 4.0),
    "data that a layer adapts to": lambda model, loss: model.layers[2].adapt(some_inputs((8, 3)) * 5),
    "an attribute of the loss": lambda model, loss: setattr(loss, "factor", 3.0),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_or_loss_is_traced_anew(change):
    keras.utils.set_random_seed(0)
    parts = [layers.Dense(3, lora_rank=1), layers.LeakyReLU(), layers.Normalization(mean=0.1, variance=2.0)]
    if change == "data that a layer adapts to":
        parts[2] = layers.Normalization()
        parts[2].adapt(some_inputs((8, 3)))
    model, loss = keras.Sequential([keras.Input((4,)), *parts, layers.Softmax()]), Scaled()
    randomize(model)
    x, y = some_inputs((5, 4)), some_inputs((5, 3))
    per_example_gradients(model, x, y, loss)
    CHANGES[change](model, loss)
    theirs = example_gradients(model, x, lambda y_pred, y: loss(y, y_pred), y)
    assert gradient_error(per_example_gradients(model, x, y, loss), theirs) < 1e-6


@pytest.mark.parametrize("trailing", [(), (1,)])
def test_targets_and_weights_with_and_without_a_last_axis(trailing):
    model, (x, y, weight) = make_model(), data()
    theirs = per_example_gradients(model, x, y, LOSSES["a loss"], weight)
    ours = per_example_gradients(model, x, y.reshape(-1, 1), LOSSES["a loss"], weight.reshape(-1, *trailing))
    assert gradient_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_weights_of_every_value_with_a_last_axis(shape):
    model = keras.Sequential([keras.Input((*shape, 2)), layers.Dense(1)])
    randomize(model)
    x, y = some_inputs((5, *shape, 2)), some_inputs((5, *shape, 1))
    weight = np.random.default_rng(1).uniform(0, 2, (5, *shape, 1)).astype("float32")
    theirs = example_gradients(model, x, lambda y_pred, y, w: tf.reduce_mean((y_pred - y) ** 2 * w), y, weight)
    assert gradient_error(per_example_gradients(model, x, y, "mse", weight), theirs) < 1e-6
    with pytest.raises(ValueError, match="sample_weight has shape .* one weight for each example"):
        per_example_gradients(model, x, y, "mse", weight[..., np.newaxis])


def test_weights_that_are_frozen_later():
    model, (x, y, _) = make_model(), data()
    assert len(per_example_gradients(model, x, y, LOSSES["a loss"])) == 4
    model.layers[0].trainable = False
    assert [gradient.shape for gradient in per_example_gradients(model, x, y, LOSSES["a loss"])] == [
        (10, 30, 3),
        (10, 3),
    ]


def test_models_are_not_kept():
    def use_one():
        model, (x, y, _) = make_model(), data()
        per_example_norms(model, x, y, LOSSES["a loss"])
        wrapped = wrap(model, clip_norm=1.0)
        wrapped.compile("sgd", LOSSES["a loss"])
        wrapped.fit(x, y, verbose=0)
        return weakref.ref(model), weakref.ref(model.layers[0].kernel.value)

    alive = use_one()
    keras.utils.clear_session()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_training_draws_random_numbers():
    model, (x, y, _) = make_model(), data()
    plain = per_example_norms(model, x, y, LOSSES["a loss"])
    np.testing.assert_array_equal(plain, per_example_norms(model, x, y, LOSSES["a loss"]))
    assert not np.array_equal(plain, per_example_norms(model, x, y, LOSSES["a loss"], training=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": np.zeros(9, int)}, r"same number of rows, and have \[9, 10\]"),
        ({"batch_size": 0}, "batch_size=256"),
        ({"loss": 3}, "loss"),
        ({"loss": None}, "loss='mse'"),
    ],
)
def test_refusals(change, says):
    model, (x, y, _) = make_model(), data()
    with pytest.raises(ValueError, match=says):
        per_example_gradients(**{"model": model, "x": x, "y": y, "loss": LOSSES["a loss"], **change})


def test_a_model_without_weights():
    model = keras.Sequential([layers.Dense(2, trainable=False)])
    with pytest.raises(ValueError, match="no trainable weights"):
        per_example_norms(model, *data()[:2], "mse")
