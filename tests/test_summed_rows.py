"""Rows of embeddings that a batch looks up twice: a step that differs from Keras's own is said, and no other."""

import functools
import logging

import keras
import numpy as np
import pytest

import keras_paragrad as kp
from keras_paragrad import DistributedFit, Pipeline

X = np.random.default_rng(0).integers(0, 5, (16, 4))
Y = X.sum(1, keepdims=True).astype("float32") / 10
DEVICES = ["CPU:0", "CPU:1"]
SAYS = "the gradients of all lookups of a row are summed"


def build(optimizer, make=lambda layers: keras.Sequential(layers)):
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(5, 3, name="words")
    layers = [keras.Input((4,), dtype="int64"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = make(layers)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def train(fit, size=8, **options):
    fit(x=X, y=Y, batch_size=size, epochs=2, shuffle=False, verbose=0, **options)


def plain(optimizer, change=lambda model: None):
    model = build(optimizer())
    change(model)
    train(model.fit)
    return model


def accumulated(optimizer):
    model = build(kp.AccumulatingOptimizer(optimizer(), steps=2))
    train(model.fit, 4, callbacks=[kp.ExactAccumulation()])
    return model


def wrapped(optimizer):
    model = build(optimizer(), lambda layers: kp.wrap(keras.Sequential(layers)))
    train(model.fit)
    return model


def distributed(dist, optimizer):
    with dist.scope():
        model = build(optimizer())
    train(functools.partial(dist.fit, model))
    return model


WAYS = {
    "accumulation": accumulated,
    "microbatch": lambda o: plain(o, lambda model: kp.microbatch(model, 4)),
    "microbatch, slices of two sizes": lambda o: plain(o, lambda model: kp.microbatch(model, 6)),
    "recompute": lambda o: plain(o, lambda model: kp.recompute(model, ["words"])),
    "transform_gradients": lambda o: plain(o, lambda model: kp.transform_gradients(model, lambda g, v: g)),
    "wrap": wrapped,
    "pipeline": lambda o: distributed(DistributedFit(Pipeline(stages=2, microbatches=2), devices=DEVICES), o),
    "mesh": lambda o: distributed(DistributedFit(mesh={"batch": 2, "model": 1}, layout="auto", devices=DEVICES), o),
}


@functools.cache
def expected(name):
    return plain(OPTIMIZERS[name]).get_weights()


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1),
}


def check(way, name, caplog):
    with caplog.at_level(logging.INFO, "keras_paragrad"):
        model = way(OPTIMIZERS[name])
    pairs = zip(model.get_weights(), expected(name), strict=True)
    differs = max(np.abs(one - other).max() for one, other in pairs) > 1e-5
    said = [record for record in caplog.records if SAYS in record.getMessage()]
    assert len(said) == differs
    assert name != "sgd" or not differs


@pytest.mark.covering
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_differs_is_said_once(way, name, caplog):
    check(WAYS[way], name, caplog)


@pytest.mark.own_process
@pytest.mark.parametrize("shard", [None, "parameters"])
def test_a_step_that_differs_is_said_once_on_replicas(shard, mirrored, caplog):
    check(functools.partial(distributed, DistributedFit(mirrored, shard=shard, min_shard_bytes=1)), "adam", caplog)


def test_clips_are_said(caplog):
    with caplog.at_level(logging.INFO, "keras_paragrad"):
        accumulated(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))
    assert any(SAYS in record.getMessage() for record in caplog.records)
