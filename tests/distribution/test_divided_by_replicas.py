"""Losses that are divided by the number of replicas, as scripts for `MirroredStrategy` do, beside one device."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import largest_difference

from keras_paragrad import DistributedFit
from keras_paragrad.compat.collectives import as_one_replica, replica_count

draw = np.random.default_rng(0)
X = draw.normal(size=(15, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


def by_row(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1)


def compared(y, y_pred):
    return ops.logsumexp(ops.matmul(y_pred, ops.transpose(y)), axis=-1)


class Adding(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)) / replicas())
        return x


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(3, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05))
        self.last = layers.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        self.last.build((None, 3))

    def call(self, x):
        return self.last(self.first(x))


class AddingNet(Net):
    def __init__(self):
        super().__init__()
        self.adding = Adding()

    def call(self, x):
        return self.last(self.adding(self.first(x)))


class Step(Net):
    def loss_of(self, y, y_pred):
        return tf.nn.compute_average_loss(by_row(y, y_pred)) + tf.nn.scale_regularization_loss(tf.add_n(self.losses))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"shown": loss}

    def test_step(self, data):
        return {"shown": self.loss_of(data[1], self(data[0], training=False))}


class OfContext(Step):
    def loss_of(self, y, y_pred):
        return ops.mean(by_row(y, y_pred)) / tf.distribute.get_replica_context().num_replicas_in_sync + sum(self.losses)


class Divided(Net):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean = tf.nn.compute_average_loss(by_row(y, y_pred))
        return mean + tf.nn.scale_regularization_loss(tf.add_n(self.losses))


CASES = {
    "own steps": (Step, None, {"weighting": "examples"}),
    "of the context": (OfContext, None, {"exact": False}),
    "compute_loss": (Divided, "mse", {"shard": "parameters", "min_shard_bytes": 1}),
    "loss function": (AddingNet, lambda y, y_pred: by_row(y, y_pred) / replicas(), {"weighting": "examples"}),
    "compared": (Net, lambda y, y_pred: compared(y, y_pred) / replicas(), {}),
}


EAGERLY = ("of the context", "loss function", "compared")


def trained(case, *, alone):
    made, loss, options = CASES[case]
    dist = None if alone else DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False, **options)
    keras.utils.set_random_seed(1)
    # Without equal parts, `exact=False` weights rows differently.
    rows = 12 if options.get("exact") is False else len(X)
    with dist.scope() if dist else keras.name_scope("alone"):
        model = made()
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1), loss=loss, jit_compile=False, run_eagerly=case in EAGERLY)
    if dist:
        dist.prepare(model)
    data = {"x": X[:rows], "y": Y[:rows], "batch_size": 6, "verbose": 0}
    fitted = model.fit(**data, shuffle=False).history
    shown = model.evaluate(**data, return_dict=True)
    return model, [*fitted.items(), *shown.items()]


@pytest.mark.few(0, "own steps", "of the context", "compute_loss")
@pytest.mark.own_process
@pytest.mark.parametrize("case", CASES)
def test_they_are_divided_by_one(case):
    (model, shown), (expected, expected_shown) = trained(case, alone=False), trained(case, alone=True)
    assert largest_difference(model, expected) < 1e-6
    assert [name for name, _ in shown] == [name for name, _ in expected_shown]
    for (name, value), (_, other) in zip(shown, expected_shown, strict=True):
        assert value == pytest.approx(other, rel=1e-5), name


def test_one_thread_alone_sees_one_replica():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    seen = {}
    with strategy.scope(), as_one_replica():
        with as_one_replica():
            pass
        seen["here"] = replicas(), strategy.num_replicas_in_sync, replica_count()
        other = threading.Thread(target=lambda: seen.update(there=strategy.num_replicas_in_sync))
        other.start()
        other.join()
    assert seen == {"here": (1, 1, 2), "there": 2}
    assert strategy.num_replicas_in_sync == 2
