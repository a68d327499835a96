"""Messages are plain text, name what a user knows, and say what replaces what."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, microbatch, transform_gradients
from keras_paragrad.compat.model import words_of
from keras_paragrad.profiling.telemetry_reports import _WARNINGS

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def build(compiled=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    if compiled:
        model.compile("adam", "mse")
    return model


def test_keras_styles_are_left_out():
    model = build()
    with pytest.raises(Exception) as caught:
        model(keras.KerasTensor((None, 7)))
    assert "\x1b[" not in words_of(caught.value)
    assert words_of(ValueError("\x1b[1mbold\x1b[0m, plain")) == "bold, plain"

    def fails(gradients, variables):
        raise ValueError("\x1b[1mbold\x1b[0m")

    with pytest.raises(ValueError, match="fails on symbolic gradients") as caught:
        transform_gradients(model, fails)
    assert "\x1b[" not in str(caught.value)


def test_a_model_of_no_scope_is_said_to_have_no_strategy():
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="built under no strategy, but is to be trained under MirroredStrategy"):
        dist.fit(build(), X, Y)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="created under MirroredStrategy, and the model is trained under no strategy"):
        AccumulatingOptimizer(optimizer, 2).build(build().trainable_variables)


def test_a_second_microbatch_warns_that_it_takes_the_place_of_the_first():
    model = build()
    microbatch(model, 4)
    with pytest.warns(UserWarning, match="takes the place of an earlier one of 'sequential.*' with size=4"):
        handle = microbatch(model, 2)
    handle.undo()
    microbatch(model, 4)


def test_microbatch_before_compile_is_exact():
    model, whole = build(compiled=False), build()
    microbatch(model, 4)
    model.compile("adam", "mse")
    for each in (model, whole):
        each.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_of_a_gradient_that_is_nan_the_data_is_looked_at_first():
    text = _WARNINGS["non-finite"]
    assert text.index("NaN in the data") < text.index("learning rate")
