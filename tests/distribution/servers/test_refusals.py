"""What workers that do not wait for each other can't do, said before anything is trained."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch
from keras_paragrad.distribution import servers
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.servers.preparation import ServerPreparation

own_process = pytest.mark.own_process(seconds=200)

REFUSED = {
    "jit_compile": (lambda: {"jit_compile": True}, "Write jit_compile=False"),
    "run_eagerly": (lambda: {"run_eagerly": True}, "Write run_eagerly=False"),
    "accumulating": (lambda: {"optimizer": AccumulatingOptimizer("adam", steps=2)}, "pass fit a larger batch_size"),
    "accumulation_steps": (
        lambda: {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)},
        "gradient_accumulation_steps",
    ),
    "overwriting": (
        lambda: {"optimizer": keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=5)},
        "Write ema_overwrite_frequency=None",
    ),
}


def build(strategy, model_class=keras.Sequential, options=dict):
    with strategy.scope():
        model = model_class([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(**{"optimizer": "sgd", "loss": "mse", **options()})
    return model


X = np.ones((20, 4), "float32")


@own_process
def test_models_that_are_refused(strategy):
    for name, (options, says) in REFUSED.items():
        model = build(strategy, options=options)
        with pytest.raises(ValueError, match=says):
            ServerPreparation.of(model)
        assert "fit" not in model.__dict__, name
    model = build(strategy)
    ServerPreparation.of(model)
    with strategy.scope():
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="Write jit_compile=False"):
        model.fit(X, X[:, :1], verbose=0)


def test_models_made_elsewhere_are_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"within `with dist.scope\(\):`"):
        ServerPreparation.of(model)


class OtherLogs(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return {"mine": tf.constant(1.0)}


class LastValue(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="last")
        self.last = self.add_variable((), "zeros", aggregation="only_first_replica", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign(keras.ops.max(y_pred))

    def result(self):
        return self.last


@own_process
def test_steps_that_are_refused(strategy):
    model = build(strategy, OtherLogs)
    ServerPreparation.of(model)
    with pytest.raises(ValueError, match=r"return self.get_metrics_result\(\)"):
        model.fit(X, X[:, :1], verbose=0)
    model = build(strategy, options=lambda: {"metrics": [LastValue()]})
    ServerPreparation.of(model)
    with pytest.raises(ValueError, match="can only be summed"):
        model.fit(X, X[:, :1], verbose=0)


@own_process
def test_what_changes_the_step_is_refused_and_leaves_the_model_well(strategy):
    model = build(strategy)
    ServerPreparation.of(model)
    with microbatch(model, 4), pytest.raises(ValueError, match="step is modified"):
        model.fit(X, X[:, :1], verbose=0)
    with pytest.raises(ValueError, match=r"how many micro-batches an update takes"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[ExactAccumulation()])
    with pytest.raises(ValueError, match="The optimizer accumulates gradients"):
        model.fit(X, X[:, :1], verbose=0, callbacks=[ExactAccumulation(steps=2)])
    model.fit(X, X[:, :1], batch_size=10, verbose=0)
    assert int(model.optimizer.iterations) == 2


@own_process
def test_a_failing_step_says_why_and_leaves_the_workers_well(strategy):
    def fails_on_large(y_true, y_pred):
        tf.debugging.assert_less(tf.reduce_max(y_true), 50.0, message="a target is too large")
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)

    logging.getLogger("tensorflow").setLevel("CRITICAL")
    model = build(strategy, options=lambda: {"loss": fails_on_large})
    ServerPreparation.of(model)
    y = np.arange(60, dtype="float32")[:, None]
    with pytest.raises(RuntimeError, match="step failed on its worker.*\n?.*a target is too large"):
        model.fit(np.ones((60, 4)), y, batch_size=4, shuffle=False, verbose=0)
    before = int(model.optimizer.iterations)
    model.fit(np.ones((40, 4)), y[:40], batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == before + 10
    assert float(model.metrics[0].count.numpy()) == 40


CLUSTER = {"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1",)}


def test_only_the_chief_trains_and_only_the_others_serve():
    with pytest.raises(ValueError, match="This process is worker 0"):
        servers.make_parameter_server_strategy(Cluster(CLUSTER, "worker", 0, "a test"))
    with pytest.raises(ValueError, match="Only workers and parameter servers serve"):
        servers.serve(Cluster(CLUSTER, "chief", 0, "a test"))


@pytest.mark.parametrize(("workers", "count"), [(0, 1), (1, 0), (True, 1), (1, 2.0)])
def test_numbers_of_tasks_are_checked(workers, count):
    with pytest.raises(ValueError, match="and must be an integer from 1 to 64"):
        servers.in_process_cluster(workers, count)
