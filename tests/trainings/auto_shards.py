"""A model of which `shard="auto"` decides what is held in shards, on replicas and on workers."""

import json
import os

import keras
import numpy as np

from keras_paragrad import DistributedFit
from keras_paragrad.storage.sharded import sharded_value

X = np.random.default_rng(0).normal(size=(24, 64)).astype("float32")


def made(optimizer=None, run_eagerly=False):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(512, "tanh"), layers.Dense(256, "tanh"), layers.Dense(1)]
    )
    optimizer = optimizer or keras.optimizers.Adam(0.01, epsilon=1e-2)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=run_eagerly)
    return model


def in_shards(variables):
    return sum(sharded_value(variable) is not None for variable in variables)


def on_a_worker(_):
    # The chief's devices would hold everything.
    chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
    dist = DistributedFit("multi_worker", shard="auto", device_bytes=5_000_000 if chief else 3_300_000)
    with dist.scope():
        model = made()
    dist.fit(model, X, X[:, :1], batch_size=16, shuffle=False, verbose=0)
    return dist.plan.shard.value, in_shards(model.trainable_variables), [each.tolist() for each in model.get_weights()]
