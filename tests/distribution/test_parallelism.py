"""A way to train is one class: here, on a named device, in two halves of each batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sample_models.machines import describe

from keras_paragrad import DistributedFit, microbatch
from keras_paragrad.distribution import Options, make_plan
from keras_paragrad.distribution.parallelism import PREPARATIONS, Decision, Decisions, Parallelism, Preparation

X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
Y = X[:, :1] ** 2


class InHalves(Preparation):
    """A model that takes its steps in halves of batches."""

    def start(self):
        self.halves = microbatch(self.model, *self.settings)

    def renew(self):
        self.set_jit_compile(False)

    def stop(self):
        self.halves.undo()

    @property
    def table(self):
        return f"{self.model.name} in halves of {self.settings[0]} examples"


class Halves(Parallelism):
    """Trains on one device, in two halves of each batch."""

    def __init__(self, device, batch_size):
        self.device, self.size = device, batch_size // 2

    @classmethod
    def check_options(cls, options):
        if options.jit is True:
            raise ValueError("jit=True, and halves are not compiled. Leave jit out.")

    def decide(self, hardware, options):
        size = f"{self.size} examples each"
        strategy = Decision(name="strategy", value="halves", reason=f"passed: {size}", override='strategy="auto"')
        devices = Decision(name="devices", value=(self.device,), reason="passed", override="Halves(...)")
        return Decisions([strategy, devices], "2 halves")

    def placement(self):
        # Not a OneDeviceStrategy: Keras drops iterators right after it made them, and TensorFlow's for devices crash
        # then, about once in a hundred times on a busy machine.
        return tf.device(self.device)

    def prepare(self, model, run):
        return InHalves.of(model, self.size)


def build(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05, clipnorm=0.1), "mse", metrics=["mae"], **options)
    return model


def assert_same(expected, found):
    for left, right in zip(*map(keras.tree.flatten, (expected, found)), strict=True):
        np.testing.assert_allclose(right, left, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def dist():
    return DistributedFit(strategy=Halves("CPU:1", 8))


def test_it_is_planned_and_explained(dist):
    plan = make_plan(describe(logical_cpus=2), Options(strategy=Halves("CPU:1", 8)))
    assert (plan.strategy.value, plan.replicas.value, plan.communication.value) == ("halves", 1, "none")
    assert "Plan: halves, 2 halves on CPU:1" in repr(dist)
    with pytest.raises(ValueError, match="Leave jit out"):
        DistributedFit(strategy=Halves("CPU:1", 8), jit=True)


def test_training_is_that_of_keras_and_is_undone(dist):
    # Tracing takes longer than the steps.
    alone = build(run_eagerly=True)
    with dist.scope():
        model = build()
    assert model.weights[0].value.device.endswith("CPU:1")
    estimate = dist.estimate(model, batch_size=8)
    assert estimate.columns[0].total > 0
    given = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_data": (X[:9], Y[:9]), "shuffle": False}
    assert_same(alone.fit(X, Y, **given).history, dist.fit(model, X, Y, **given).history)
    assert "halves of 4 examples" in dist.explain().estimate
    prepared = dist.prepare(model)
    for each in (alone, model):
        each.compile(keras.optimizers.SGD(0.1), "mae", run_eagerly=each is alone)
    assert dist.prepare(model) is prepared
    assert_same(alone.fit(X, Y, **given).history, model.fit(X, Y, **given).history)
    assert_same(alone.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0))
    assert_same(alone.predict(X, verbose=0), model.predict(X, verbose=0))
    prepared.undo()
    assert "make_train_function" not in vars(model) and not PREPARATIONS.of(model)
    assert_same(alone.fit(X, Y, **given).history, model.fit(X, Y, **given).history)
    assert_same(alone.get_weights(), model.get_weights())


def test_undo_leaves_what_was_compiled_since(dist):
    with dist.scope():
        model = build()
        for since in (False, True):
            model.compile("sgd", "mse", jit_compile=not since)
            prepared = dist.prepare(model)
            assert model.jit_compile is False
            if since:
                model.compile("sgd", "mae", jit_compile=True)
            prepared.undo()
            assert model.jit_compile is True
        prepared = dist.prepare(model)
        model.compile("sgd", "mae", jit_compile=True)
        assert dist.prepare(model) is prepared
        assert model.jit_compile is False
        prepared.undo()
        prepared.undo()
        assert model.jit_compile is True
