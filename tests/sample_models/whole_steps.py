"""A model whose `train_step` compares the rows of a batch, and its training on workers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sample_models.step_models import compiled, data_of

from keras_paragrad import DistributedFit
from keras_paragrad.storage.sharded import sharded_value


class Everything(keras.Model):
    """A chain of networks, of which one normalizes, a penalty by slopes, gradients clipped by hand, and a queue."""

    def __init__(self, **options):
        super().__init__()
        normalization = layers.BatchNormalization(synchronized=True)
        self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(8), normalization, layers.Dense(4)])
        self.critic = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
        self.average = keras.models.clone_model(self.critic)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")
        self.queue = self.add_weight(shape=(7, 4), initializer="zeros", trainable=False, name="queue")
        self.tracker, self.total = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="total")

    @property
    def metrics(self):
        return [self.tracker, self.total]

    def penalty(self, encoded):
        with tf.GradientTape() as tape:
            tape.watch(encoded)
            judged = self.critic(encoded)
        slopes = tape.gradient(judged, encoded)
        return ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6) - 1.0))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            encoded = self.encoder(x, training=True) * self.scale
            noise = tf.random.normal((40, 4), seed=3)[: ops.shape(x)[0]]
            similar = ops.matmul(encoded + 0.1 * noise, ops.transpose(ops.concatenate([encoded, self.queue])))
            contrast = keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(x)[0]), similar, True)
            judged = self.critic(ops.concatenate([encoded, encoded[::-1]]))
            loss = ops.mean(contrast) + ops.max(judged) + 0.5 * self.penalty(encoded)
        weights = [*self.encoder.trainable_weights, *self.critic.trainable_weights, self.scale]
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.5)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        for weight, average in zip(self.critic.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.queue.assign(ops.concatenate([encoded, self.queue], axis=0)[:7])
        self.tracker.update_state(loss)
        self.total.update_state(ops.cast(y, "float32"))
        return {"mean": self.tracker.result(), "total": self.total.result(), "norm": norm}


def trained(case):
    """The largest error of weights and logs on a worker, as a share of each or of one.

    And how far the weights have moved, and how many of them are in shards.
    """
    dist = DistributedFit("multi_worker", devices=["CPU:0"], shard=case["shard"], min_shard_bytes=16)
    options = {"batch_size": case["rows"], "epochs": 2, "shuffle": False, "verbose": 0}
    # Keras 3.16 traces each size of batches anew, and a seeded operation draws from the start in each trace.
    plain = compiled(Everything, jit_compile=False, run_eagerly=True)
    before = plain.get_weights()
    shown = plain.fit(*data_of(plain), **options).history
    with dist.scope():
        model = compiled(Everything, jit_compile=False)
    history = dist.fit(model, *data_of(model), **options).history
    pairs = [
        *zip(model.get_weights(), plain.get_weights(), strict=True),
        *((np.array(history[name]), np.array(values)) for name, values in shown.items()),
    ]
    return {
        "error": max(float(np.abs(one - other).max() / max(1.0, np.abs(other).max())) for one, other in pairs),
        "moved": max(float(np.abs(one - other).max()) for one, other in zip(before, plain.get_weights(), strict=True)),
        "in_shards": sum(sharded_value(weight) is not None for weight in model.trainable_weights),
    }
