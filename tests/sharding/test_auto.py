"""`shard="auto"`: whole variables while a step fits the devices, else the cheapest shards that fit."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from runner import own_process
from trainings import auto_shards
from trainings.auto_shards import X, in_shards, made

from keras_paragrad import DistributedFit
from keras_paragrad.storage.sharded import sharded_value

# A step takes 3.5 MiB whole, 2.4 with the optimizer in shards, and 2.3 with everything; a fifth of a device is left.
CHOSEN = {5_000_000: "none", 3_300_000: "optimizer", 3_050_000: "parameters", 2_000_000: "parameters"}


def auto(**options):
    return DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=False, shard="auto", **options)


@pytest.mark.own_process
def test_the_cheapest_that_fits(caplog):
    # Two steps take less than tracing them.
    alone = made(run_eagerly=True)
    history = alone.fit(X, X[:, :1], batch_size=16, shuffle=False, verbose=0).history
    for size, shard in CHOSEN.items():
        dist = auto(device_bytes=size)
        assert dist.plan.shard.value == "auto"
        with dist.scope():
            model = made()
            if size in (5_000_000, 2_000_000):
                # Slots that were made in shards are held whole as well.
                model.optimizer.build(model.trainable_variables)
        assert in_shards(model.trainable_variables) == 2
        # Whole, it is trained as on any replicas; the last is as the one before it, but for what is said.
        trained = shard != "none" and size > 2_000_000
        if trained:
            shown = dist.fit(model, X, X[:, :1], batch_size=16, shuffle=False, verbose=0).history
        else:
            dist.prepare(model, batch_size=16)
        assert dist.plan.shard.value == shard
        assert in_shards(model.trainable_variables) == (0 if shard == "none" else 2)
        assert in_shards(model.optimizer.variables) == (0 if shard == "none" else 4)
        copies = [storage.copies for each in model.trainable_variables if (storage := sharded_value(each))]
        assert all((each is not None) == (shard == "optimizer") for each in copies)
        if trained:
            for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
            assert shown["loss"] == pytest.approx(history["loss"], rel=1e-5)
        explained = str(dist.explain())
        assert "estimated for a step: whole 3.5" in explained
        assert "Optimizer slots" in explained
    warned = [record for record in caplog.records if "may run out of memory" in record.message]
    assert len(warned) == 1
    assert "1.91 MiB" in warned[0].message
    mesh = 'mesh={"batch": 1, "model": 2}, layout="auto"'
    assert mesh in warned[0].message
    assert "neither whole variables nor shards fit" in dist.plan.shard.evidence
    assert mesh in dist.plan.shard.override


@pytest.mark.long
@pytest.mark.own_process
def test_each_model_of_a_scope_is_decided_on(tmp_path):
    dist = auto(device_bytes=5_000_000)
    with dist.scope():
        small = made()
    dist.prepare(small, batch_size=16)
    assert dist.plan.shard.value == "none"
    with dist.scope():
        large = made(keras.optimizers.SGD())
    assert dist.plan.shard.value == "auto"
    dist.prepare(large, batch_size=16 * 1024)
    assert dist.plan.shard.value == "parameters"
    assert (in_shards(small.trainable_variables), in_shards(large.trainable_variables)) == (0, 2)
    small.fit(X, X[:, :1], batch_size=16, verbose=0)
    assert in_shards(small.optimizer.variables) == 0
    small.save(tmp_path / "small.keras")
    loaded = keras.models.load_model(tmp_path / "small.keras")
    for ours, theirs in zip(loaded.get_weights(), small.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.own_process
def test_refusals(caplog):
    dist = auto()
    with dist.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
        unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has no weights yet. Build it within"):
        dist.prepare(unbuilt)
    with dist.scope():
        model = made()
    ragged = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(tf.TensorSpec((None, None)), tf.TensorSpec((None, 1)))
    )
    with pytest.raises(ValueError, match="Memory depends on dimensions whose size the data doesn't specify"):
        dist.fit(model, ragged.apply(tf.data.experimental.assert_cardinality(4)), verbose=0)
    with pytest.raises(ValueError, match='choose shard=|only used by shard="auto" and fit_memory=True, but shard is'):
        DistributedFit("none", device_bytes=1)
    # One replica has nobody to share with, which is no error: the script may run anywhere.
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        assert DistributedFit("none", shard="auto").plan.shard.value == "none"
    assert not caplog.records


@pytest.mark.slow(15)
def test_workers_choose_what_fits_all_of_them():
    alone = made(run_eagerly=True)
    alone.fit(X, X[:, :1], batch_size=16, shuffle=False, verbose=0)
    for shard, count, weights in own_process.on_workers(auto_shards.on_a_worker, None, seconds=90):
        assert (shard, count) == ("optimizer", 2)
        for ours, theirs in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
