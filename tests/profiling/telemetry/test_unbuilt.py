"""Models that get their weights in the first step, steps that update a part of them, and steps that update nothing."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.telemetry_loops import X, Y, assert_reports, expected, inner

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, GradientNoiseScale, microbatch
from keras_paragrad.profiling.telemetry import GradientTelemetry


def adam(**more):
    return keras.optimizers.Adam(0.01, **more)


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5, activation="tanh", name="first")
        self.second = keras.layers.Dense(1, name="second")

    def call(self, x):
        return self.second(self.first(x))


class OwnStep(Subclass):
    """A step that calls the layers and not the model, whose `call` nobody could build it by."""

    def call(self, x):
        raise NotImplementedError

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.second(self.first(x)) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def sequential():
    return keras.Sequential(
        [keras.layers.Dense(5, activation="tanh", name="first"), keras.layers.Dense(1, name="second")]
    )


def fitted(make, optimizer, every, batch_size, callbacks=(), **more):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer, "mse", **more)
    telemetry = GradientTelemetry(every=every)
    model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[*callbacks, telemetry])
    return telemetry


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (Subclass, {"jit_compile": True}),
        (Subclass, {"jit_compile": False, "steps_per_execution": 3}),
        (sequential, {"run_eagerly": True}),
        (OwnStep, {"jit_compile": False}),
    ],
)
def test_a_model_that_is_built_by_its_first_step(make, every, more):
    telemetry = fitted(make, adam(clipnorm=0.3), every, 16, **more)
    per_call = more.get("steps_per_execution", 1)
    by_call = {(step - 1) // per_call: step for step in range(every, 7, every)}
    assert_reports(telemetry.last, expected(adam, 16, clip={"clipnorm": 0.3}), list(by_call.values()))
    assert telemetry.layers == ("first", "second")


@pytest.mark.long
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "stock"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_unbuilt_model_whose_gradients_are_accumulated(every, exact):
    optimizer = AccumulatingOptimizer(adam(), 2, weighting="auto" if exact else "uniform")
    callbacks = [ExactAccumulation()] if exact else []
    # One of them is traced.
    telemetry = fitted(Subclass, optimizer, every, 8, callbacks, run_eagerly=not exact)
    assert_reports(telemetry.last, expected(adam, 16), range(every, 7, every))


def test_an_unbuilt_model_whose_gradients_keras_accumulates():
    telemetry = fitted(Subclass, adam(gradient_accumulation_steps=2), 2, 8, run_eagerly=True)
    assert_reports(telemetry.last, expected(adam, 16), [2, 4, 6])


@pytest.mark.long
def test_an_unbuilt_model_in_slices():
    def sliced():
        model = Subclass()
        microbatch(model, 4)
        return model

    telemetry = fitted(sliced, adam(), 3, 16)
    assert_reports(telemetry.last, expected(adam, 16), [3, 6])


@pytest.mark.long
def test_the_noise_scale_of_an_unbuilt_model():
    noises = []
    for make in (inner, Subclass):
        noise = GradientNoiseScale(source="accumulation")
        built = make is inner
        fitted(make, AccumulatingOptimizer(adam(), 2), 1, 8, [ExactAccumulation(), noise], run_eagerly=built)
        noises.append(noise.noise)
    np.testing.assert_allclose(noises[1], noises[0], rtol=1e-5)


HIDDEN = []


@pytest.mark.parametrize("hidden", [False, True])
def test_updates_by_another_optimizer_as_well(hidden):
    """Adam's update of a weight is the same whatever else it updates."""

    class Adversarial(Subclass):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            for optimizer, layer in ((self.optimizer, self.second), ((HIDDEN or self.others)[0], self.first)):
                weights = layer.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    def made():
        model = Adversarial()
        model.others = [adam()]
        return model

    HIDDEN[:] = [adam()] if hidden else []
    if hidden:
        with pytest.raises(ValueError, match="train_step of Adversarial .* attribute of the model"):
            fitted(made, adam(), 7, 16, run_eagerly=True)
        return
    telemetry = fitted(made, adam(), 1, 16, run_eagerly=True)
    assert telemetry.layers == ("first", "second")
    assert_reports(telemetry.last, expected(adam, 16), range(1, 7))


def test_the_same_optimizer_after_a_layer_was_frozen():
    model = inner()
    optimizer = adam()
    telemetry = GradientTelemetry(every=1)
    for trainable in (True, False):
        model.layers[0].trainable = trainable
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=48, shuffle=False, verbose=0, callbacks=[telemetry])
    assert telemetry.layers == ("second",)
    np.testing.assert_array_equal(telemetry.last.steps, [3, 4])


class WithoutUpdate(OwnStep):
    def train_step(self, data):
        return {"loss": tf.reduce_mean((self.second(self.first(data[0])) - data[1]) ** 2)}


def frozen():
    model = sequential()
    model.trainable = False
    return model


def weightless():
    return keras.Sequential([keras.layers.Flatten()])


def overflowing():
    return keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**127, dynamic_growth_steps=10**6)


# Keras says it of every step.
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights:UserWarning")
@pytest.mark.parametrize(
    ("make", "make_optimizer", "every", "says"),
    [
        (sequential, adam, 7, "none of the updates 1 to 6 is a multiple of every=7. Write every=1."),
        (WithoutUpdate, adam, 1, "the model's optimizer, 'adam', made none. Only its updates are measured"),
        (frozen, adam, 1, "the model has no trainable weights."),
        (weightless, adam, 1, "the model has no trainable weights."),
        (sequential, overflowing, 1, "A LossScaleOptimizer skips updates whose gradient overflows"),
    ],
)
def test_a_training_without_a_report_says_why(make, make_optimizer, every, says, caplog, tmp_path):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(make_optimizer(), "mse", loss_weights=2.0**30, run_eagerly=True)
    telemetry = GradientTelemetry(tmp_path, every=every)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[telemetry])
    assert telemetry.last is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert "GradientTelemetry reported no update" in message
    assert says in message
    assert (tmp_path / "telemetry.csv").read_text() == "step,epoch,layer,variable,quantity,value\n"


def test_updates_made_outside_of_the_step(caplog):
    # Of data of unknown length, the last window is closed after the last step.
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda *batch: True)
    model = inner()
    model.compile(AccumulatingOptimizer(adam(), 100), "mse", run_eagerly=True)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        callbacks = [ExactAccumulation(), GradientTelemetry(every=1)]
        model.fit(batches, shuffle=False, verbose=0, callbacks=callbacks)
    assert "updates 1 to 1 were made outside the training step" in caplog.text


def test_an_update_that_closes_the_last_window_is_seen(caplog):
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        telemetry = fitted(inner, AccumulatingOptimizer(adam(), 100), 1, 16, [ExactAccumulation()], run_eagerly=True)
    assert not caplog.records
    assert telemetry.last is not None


def test_a_fit_without_epochs_says_nothing(caplog):
    model = inner()
    model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        model.fit(X, Y, epochs=0, verbose=0, callbacks=[GradientTelemetry()])
    assert not caplog.records
