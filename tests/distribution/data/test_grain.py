"""Grain's datasets train as on one device, in each way, and on workers."""

import numpy as np
import pytest
from runner import left_out, own_process
from trainings import every_component
from workers import grain_worker
from workers.grain_worker import KINDS, rows

import keras_paragrad as paragrad

grain = pytest.importorskip("grain", reason=left_out.NO_GRAIN)
X, Y = every_component.X, every_component.Y


@pytest.fixture(scope="module")
def expected():
    """What Keras ends with of the rows in arrays, and what it shows."""
    model = every_component.network(weighted_metrics=["accuracy"])
    history = model.fit(
        X,
        Y,
        sample_weight=every_component.WEIGHTS,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y, every_component.WEIGHTS),
    )
    return model.get_weights(), history.history


def assert_as_expected(model, history, expected):
    weights, shown = expected
    for one, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert history.history.keys() == shown.keys()
    for name, values in shown.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


def plainly(change):
    def train(data):
        model = every_component.network(weighted_metrics=["accuracy"])
        change(model)
        return model, model.fit(data(8), epochs=2, shuffle=False, verbose=0, validation_data=data(8))

    return train


def accumulating(data):
    optimizer = paragrad.AccumulatingOptimizer("sgd", steps=2)
    model = every_component.network(optimizer, weighted_metrics=["accuracy"])
    history = model.fit(
        data(4), epochs=2, shuffle=False, verbose=0, validation_data=data(8), callbacks=[paragrad.ExactAccumulation()]
    )
    return model, history


def distributed(**options):
    def train(data):
        dist = paragrad.DistributedFit(
            jit=False, **{name: each() if callable(each) else each for name, each in options.items()}
        )
        with dist.scope():
            model = every_component.network(weighted_metrics=["accuracy"])
        return model, dist.fit(model, data(8), epochs=2, shuffle=False, verbose=0, validation_data=data(8))

    return train


def prepared(data):
    dist = paragrad.DistributedFit("mirrored", devices=every_component.TWO, jit=False)
    with dist.scope():
        model = every_component.network(weighted_metrics=["accuracy"])
    dist.prepare(model)
    # Keras warns that it doesn't shuffle them.
    return model, model.fit(data(8), epochs=2, shuffle=False, verbose=0, validation_data=data(8))


replicas = {"strategy": "mirrored", "devices": every_component.TWO}
WAYS = {
    "accumulation": accumulating,
    "slices": plainly(lambda model: paragrad.microbatch(model, 3)),
    "recompute": plainly(lambda model: paragrad.recompute(model, [model.layers[1].name])),
    "replicas": distributed(**replicas),
    "prepared": prepared,
    "optimizer in shards": distributed(**replicas, shard="optimizer", min_shard_bytes=16),
    "parameters in shards": distributed(**replicas, shard="parameters", min_shard_bytes=16),
    "pipeline": distributed(
        strategy=lambda: paragrad.Pipeline(stages=2, microbatches=2), devices=[["CPU:0"], ["CPU:1"]]
    ),
    "mesh": distributed(mesh={"batch": 1, "model": 2}, layout="auto", devices=every_component.TWO),
}

# Of the others, what reads batches is the same.
QUICK = ("accumulation", "replicas", "parameters in shards", "mesh")


@pytest.mark.own_process(seconds=240)
@pytest.mark.few(0, "accumulation-MapDataset")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way not in QUICK)) for way in WAYS])
def test_each_way_trains_as_on_arrays(way, kind, expected):
    assert_as_expected(*WAYS[way](KINDS[kind]), expected)


def test_what_else_reads_batches_reads_grains():
    model = every_component.network()
    found = paragrad.input_gradients(model, grain.MapDataset.source(X).batch(8), output=0)
    np.testing.assert_allclose(found, paragrad.input_gradients(model, X, output=0), rtol=0, atol=1e-6)
    options = {"device_bytes": 2**30, "max_batch_size": 8, "steps": 0, "verbose": 0}
    assert paragrad.find_batch_size(model, KINDS["MapDataset"](8), **options) == 8


def test_what_does_not_fit_is_refused():
    dist = paragrad.DistributedFit("none")
    with pytest.raises(ValueError, match="batch_size=4 is given for a BatchMapDataset, which has to be batched"):
        dist.dataset(rows().batch(8), batch_size=4)
    with pytest.raises(ValueError, match=r"The data is infinite. Write steps_per_epoch="):
        dist.dataset(rows().repeat().batch(8))
    private = paragrad.make_private(
        every_component.network(), clip_norm=1.0, noise_multiplier=1.0, examples=20, delta=1e-5, expected_batch_size=8
    )
    private.compile("sgd", every_component.LOSS, jit_compile=False)
    with pytest.raises(ValueError, match="Examples of BatchMapDataset can't be read in random order"):
        private.fit(rows().batch(8), verbose=0)


@pytest.fixture(scope="module")
def workers():
    return own_process.on_workers(grain_worker.main, None, seconds=240)


@pytest.mark.long
def test_workers_train_on_them_as_one_device(workers, expected):
    for each in workers:
        for name, found in each["trained"].items():
            assert found["history"].keys() == expected[1].keys()
            for one, other in zip(found["weights"], expected[0], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6, err_msg=name)
            for shown, values in expected[1].items():
                np.testing.assert_allclose(found["history"][shown], values, rtol=1e-5, err_msg=f"{name}: {shown}")
            np.testing.assert_allclose(found["predicted"], workers[0]["trained"][name]["predicted"])
            assert len(found["predicted"]) == len(X)


@pytest.mark.long
def test_what_differs_between_workers_is_refused(workers):
    for each in workers:
        assert "different first batches of data" in each["refused"]
