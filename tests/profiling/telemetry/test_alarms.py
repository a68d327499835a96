"""Layers whose gradient goes wrong are named, each once."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_paragrad.profiling.meter import weights_of
from keras_paragrad.profiling.telemetry import GradientTelemetry
from keras_paragrad.profiling.telemetry_reports import Alarms

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(160, 6)).astype("float32")
Y = GENERATOR.normal(size=(160, 1)).astype("float32")


@keras.saving.register_keras_serializable(package="telemetry_tests")
class Planted(keras.layers.Layer):
    """A dense layer whose weights' gradient is multiplied from its fifth step on."""

    def __init__(self, factor, **options):
        super().__init__(**options)
        self.factor = factor

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 4))
        self.step = self.add_weight(name="step", shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs):
        self.step.assign_add(1)
        factor = tf.where(self.step < 5, 1.0, self.factor)

        @tf.custom_gradient
        def planted(kernel):
            return tf.identity(kernel), lambda gradient: gradient * factor

        return inputs @ planted(self.kernel.value)


def said(caplog, layers, every=1, optimizer="sgd", batch_size=8, epochs=2, **more):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1, name="last")])
    model.compile(optimizer, "mse", **more)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        model.fit(X, Y, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[GradientTelemetry(every=every)])
    return [record.getMessage() for record in caplog.records if record.name == "keras_paragrad"]


@pytest.mark.few(1)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(
    ("factor", "what"), [(1e5, "explodes"), (float("nan"), "infinite or NaN"), (1e-12, "vanishes"), (0.0, "is 0")]
)
def test_a_planted_layer_is_named_once(caplog, factor, what, jit):
    optimizer = keras.optimizers.SGD(0.0)
    messages = said(
        caplog, [keras.layers.Dense(5, name="first"), Planted(factor, name="planted")], 1, optimizer, jit_compile=jit
    )
    # What is not finite spreads to all layers by the next update.
    assert len(messages) == (1 if factor == factor else 2)
    assert f"{what} in 'planted' at update" in messages[0]
    assert "'planted'" not in "".join(messages[1:])
    step = int(messages[0].partition("at update ")[2].split()[0].rstrip(".:"))
    assert step == (5 if factor > 1 or factor != factor else 7)


def test_a_dead_relu_is_named_with_the_layers_behind_it(caplog):
    dead = keras.layers.Dense(4, activation="relu", bias_initializer=keras.initializers.Constant(-100.0), name="dead")
    messages = said(caplog, [keras.layers.Dense(5, name="first"), dead], 5)
    assert len(messages) == 1
    assert "the gradient is 0 in 'first', 'dead' at update 15" in messages[0]


def test_a_weight_of_the_model_s_own_is_named_by_the_model():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="last")], name="mine")
    model.add_weight(shape=(2,), name="own")
    named = [(weight.layer, weight.name) for weight in weights_of(model, model.trainable_variables)]
    assert sorted(named) == [("last", "bias"), ("last", "kernel"), ("mine", "own")]


@pytest.mark.long
def test_healthy_training_says_nothing(caplog):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(8)]
    assert said(caplog, layers, 1, "adam", epochs=5) == []


def test_a_second_fit_does_not_say_it_again(caplog):
    model = keras.Sequential([keras.Input((6,)), Planted(0.0, name="planted"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    telemetry = GradientTelemetry(every=1)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        for _ in range(3):
            model.fit(X, Y, verbose=0, epochs=2, callbacks=[telemetry])
    assert len(caplog.records) == 1


@given(norms=st.lists(st.floats(0.1, 50), min_size=2, max_size=6), steps=st.integers(1, 8))
def test_layers_of_like_norms_are_let_be(norms, steps):
    alarms = Alarms([str(place) for place in range(len(norms))])
    table = np.array([norms] * steps)
    assert list(alarms.check(np.arange(steps), table, np.zeros_like(table))) == []


@given(factor=st.floats(1.1e3, 1e30), place=st.integers(0, 3), before=st.integers(1, 5))
def test_a_norm_that_rises_is_said_at_once(factor, place, before):
    table = np.ones((before + 2, 4))
    table[before:, place] = factor
    (message,) = Alarms(list("abcd")).check(np.arange(before + 2), table, np.zeros_like(table))
    assert f"explodes in '{'abcd'[place]}' at update {before}:" in message


def test_all_layers_that_rise_together():
    table = np.array([[1.0, 2.0], [1.0, 2.0], [1e5, 2e5]])
    (message,) = Alarms(["a", "b"]).check(np.arange(3), table, np.zeros_like(table))
    assert "'a', 'b'" in message


def test_squares_that_overflow():
    table = np.array([[1.0, np.inf]])
    (message,) = Alarms(["a", "b"]).check(np.arange(1), table, np.zeros_like(table))
    assert "explodes in 'b'" in message
