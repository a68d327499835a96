"""Data that has run dry: no epoch shows a loss that nothing was computed for."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad as kp
from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, Pipeline

DRY = "no batch left for this epoch or evaluation"
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
DEVICES = ["CPU:0", "CPU:1"]


def generator(rows=8):
    for start in range(0, len(X), rows):
        yield X[start : start + rows], Y[start : start + rows]


def empty():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda *_: False)


def build(optimizer="sgd"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def on(dist):
    with dist.scope():
        model = build()
    return model, functools.partial(dist.fit, model)


def component(name, mirrored):
    """A model, and its `fit`."""
    if name == "accumulation":
        model = build(AccumulatingOptimizer("sgd", steps=2))
        return model, functools.partial(model.fit, callbacks=[ExactAccumulation()])
    if name == "none":
        return on(DistributedFit("none"))
    if name == "replicas":
        return on(DistributedFit(mirrored))
    if name == "mesh":
        return on(DistributedFit(mesh={"batch": 2, "model": 1}, layout="auto", devices=DEVICES))
    if name == "pipeline":
        return on(DistributedFit(Pipeline(stages=2, microbatches=2), devices=DEVICES))
    model = build()
    if name == "microbatch":
        kp.microbatch(model, 4)
    if name == "telemetry":
        return model, functools.partial(model.fit, callbacks=[kp.GradientTelemetry(every=1)])
    return model, model.fit


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["accumulation", "microbatch", "telemetry"])
def test_an_epoch_without_a_batch_is_refused(name):
    model, fit = component(name, None)
    # Keras goes on reading this generator, and shows 0.0 for the second epoch.
    with pytest.raises(ValueError, match=DRY):
        fit(generator(), steps_per_epoch=3, epochs=2, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == (2 if name == "accumulation" else 3)
    # Nothing of the failed fit is left.
    history = fit(X, Y, batch_size=8, epochs=1, verbose=0).history
    assert history["loss"][0] > 0


def refuses_dry_data(name, mirrored=None):
    model, fit = component(name, mirrored)
    seen = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    with pytest.raises(ValueError, match=DRY):
        fit(generator(), epochs=3, shuffle=False, verbose=0, callbacks=[log])
    assert len(seen) == 1 and seen[0] > 0
    assert int(model.optimizer.iterations.numpy()) == 3
    with pytest.raises(ValueError, match=DRY):
        fit(X, Y, batch_size=8, epochs=1, validation_data=empty(), verbose=0)
    assert fit(X, Y, batch_size=8, epochs=1, verbose=0).history["loss"][0] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["none", "mesh", "pipeline"])
def test_a_generator_that_ran_dry_is_refused(name):
    refuses_dry_data(name)


@pytest.mark.own_process
def test_a_generator_that_ran_dry_is_refused_on_replicas(mirrored):
    refuses_dry_data("replicas", mirrored)


def test_several_batches_a_call_and_an_uneven_end_are_no_dry_data():
    model, fit = on(DistributedFit("none"))
    model.steps_per_execution = 2
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda *_: True)
    history = fit(data, epochs=2, shuffle=False, validation_data=data, verbose=0).history
    assert min(history["loss"] + history["val_loss"]) > 0
