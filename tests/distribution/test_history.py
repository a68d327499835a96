"""The losses that `fit` and `evaluate` show are those of one device, whatever they are divided by."""

import contextlib

import keras
import numpy as np
import pytest
from oracles.histories import BATCHES, CASES, MICRO_BATCHES, MicroBatches, assert_same, shown_by

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch
from keras_paragrad.distribution.data import distributed_dataset

TWO_REPLICAS = ["CPU:0", "CPU:1"]
# Masks and several outputs are trained in graphs below; the latter, in `make test`, in test_shown_by_workers.py.
ON_REPLICAS = ("added values",)
MORE_ON_REPLICAS = (
    *("not reduced", "one number"),
    *("ignore_class", "two of different kinds", "added mean", "sum", "compute_loss"),
    *("added values alone", "added sum", "compute_loss of sums"),
)
TRAINED = {name: case for name, case in CASES.items() if case.trains}
# In `make test`, a case for each thing that a loss may be divided by, and each way in which it says so.
SHORT = ("mask and weights", "sum of masked", "weights", "two not reduced", "one number", "added sum", "compute_loss")
# For cases that differ from others only in what they are divided by: graphs take longer to trace than all these steps.
EAGERLY = {"run_eagerly": True, "epochs": 1}


def accumulating(case):
    return AccumulatingOptimizer(case.model().optimizer, 3, weighting=case.weighting)


def in_windows(case, epochs=2, **mode):
    model = case.model(accumulating(case), **mode)
    data = MicroBatches(case.columns, MICRO_BATCHES)
    return shown_by(case, model, data, epochs=epochs, callbacks=[ExactAccumulation()])


def in_slices(case, epochs=2, **mode):
    model = case.model(**mode)
    with microbatch(model, 3, weighting=case.weighting):
        return shown_by(case, model, MicroBatches(case.columns, BATCHES), epochs=epochs)


def on_replicas(case, sizes=BATCHES, optimizer=lambda case: None, callbacks=(), epochs=2, **mode):
    dist = DistributedFit(devices=TWO_REPLICAS, weighting=case.weighting, jit=mode.get("jit_compile", False))
    with dist.scope():
        model = case.model(optimizer(case), **mode)
    dist.prepare(model)
    data, checked = (dist.dataset(MicroBatches(case.columns, each)) for each in (sizes, BATCHES))
    return shown_by(case, model, data, checked, epochs, callbacks=list(callbacks))


def check_all(cases, shown, **mode):
    for name, case in cases.items():
        try:
            assert_same(shown(case, **mode), case.expected(**mode))
        except AssertionError as error:
            raise AssertionError(f"{name} {mode}: {error}") from error


@pytest.mark.covering
@pytest.mark.parametrize("shown", [in_slices, in_windows])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in TRAINED]
)
def test_in_slices_and_in_windows(name, shown):
    # Keras's trackers of outputs' losses count otherwise where batches have no static size.
    mode = {} if name in ("mask", "two outputs", "two not reduced") else EAGERLY
    assert_same(shown(TRAINED[name], **mode), TRAINED[name].expected(**mode))


@pytest.mark.own_process
@pytest.mark.parametrize(
    "names", [ON_REPLICAS, pytest.param(MORE_ON_REPLICAS, marks=pytest.mark.long)], ids=["few", "more"]
)
def test_on_replicas(names):
    """With a replica that gets nothing of the last batch, and losses that Keras does not divide by the replicas."""
    check_all({name: CASES[name] for name in names}, on_replicas, **EAGERLY)


@pytest.mark.own_process
@pytest.mark.parametrize(
    ("names", "mode"),
    [
        pytest.param(["mask"], {"jit_compile": True}, id="XLA", marks=pytest.mark.long),
        # In `make test`, workers have several outputs in a graph, in test_shown_by_workers.py.
        pytest.param(["two outputs"], {}, id="graph", marks=pytest.mark.long),
        pytest.param(["two outputs"], {"jit_compile": True}, id="XLA, two outputs", marks=pytest.mark.long),
        pytest.param(["mask"], {}, id="graph, mask", marks=pytest.mark.long),
    ],
)
def test_on_replicas_in_a_graph(names, mode):
    check_all({name: CASES[name] for name in names}, on_replicas, **mode)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize(("name", "mode"), [("sum of masked", EAGERLY), ("two outputs", {})])
def test_in_windows_on_replicas(name, mode):
    def in_windows_on_replicas(case, **mode):
        return on_replicas(case, MICRO_BATCHES, accumulating, [ExactAccumulation()], **mode)

    check_all({name: CASES[name]}, in_windows_on_replicas, **mode)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("name", ["mask", "two outputs"])
def test_in_windows_under_a_bare_strategy(mirrored, name):
    def under_the_strategy(case):
        with mirrored.scope():
            model = case.model(accumulating(case))
        data = distributed_dataset(mirrored, MicroBatches(case.columns, MICRO_BATCHES))
        return model.fit(data, epochs=2, verbose=0, callbacks=[ExactAccumulation()]).history

    expected = CASES[name].expected()
    shown = {key: values for key, values in expected.items() if not key.startswith("val_")}
    assert_same(under_the_strategy(CASES[name]), shown)


@pytest.mark.own_process
def test_evaluating_losses_that_layers_add():
    """They are computed on whole batches: Keras divides those of activity regularizers by the rows."""
    case, results = CASES["sum"], []
    for dist in (DistributedFit("none"), DistributedFit(devices=TWO_REPLICAS, jit=False)):
        keras.utils.set_random_seed(0)
        with dist.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activity_regularizer="l2")])
            model.compile("sgd", "mse", run_eagerly=True)
        dist.prepare(model)
        data = MicroBatches(case.columns, BATCHES)
        results.append(model.evaluate(dist.dataset(data) if len(results) else data, verbose=0))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["two of different kinds", "two ignored classes", "two weighted"])
def test_outputs_that_are_divided_by_different_things_are_computed_whole(name):
    case, weights = CASES[name], []
    for size in (None, 3):
        keras.utils.set_random_seed(0)
        model = case.model(run_eagerly=True)
        with microbatch(model, size) if size else contextlib.nullcontext():
            model.fit(MicroBatches(case.columns, BATCHES), verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
