"""A component needs the private names of its own parts, looks for them when it is made, and for no others."""

import functools

import pytest
import tensorflow as tf
from runner import own_process
from sample_models.machines import describe
from seam import taken_away
from trainings import parts_on_clusters
from trainings.every_component import CASES

from keras_paragrad import DistributedFit
from keras_paragrad.compat import check
from keras_paragrad.compat.check import FOUND, check_internals
from keras_paragrad.compat.names import HOOKS, NAMES
from keras_paragrad.distribution.mesh.parallelism import MeshParallel
from keras_paragrad.distribution.parallelism import Strategies
from keras_paragrad.distribution.replicas.parallelism import DataParallel
from keras_paragrad.distribution.servers.parallelism import ParameterServers

# What a case may differ by from the oracle.
TOLERANCE = 1e-6


def make(name):
    """Makes a case's component, or where that is a function calls it."""
    made = CASES[name].make()
    if CASES[name].called:
        CASES[name].run(made)
    return made


@functools.cache
def parts_of(name):
    """The parts whose names a component looks for when it is made."""
    FOUND.clear()
    make(name)
    return frozenset(check.FOUND)


@pytest.mark.few(9)
@pytest.mark.parametrize("name", CASES)
def test_a_component_works_without_the_names_of_other_parts(name):
    parts = parts_of(name)
    FOUND.clear()
    made = CASES[name].make()
    with taken_away.without(NAMES.keys() - parts):
        assert CASES[name].run(made) < TOLERANCE
    assert parts == check.FOUND, "it has looked for more after it was made"


def _take(monkeypatch, gone):
    def problem(hook):
        return check.MISSING if hook is gone and not hook.optional else None

    monkeypatch.setattr(check, "problem", problem)


@pytest.mark.parametrize("name", CASES)
def test_without_a_name_of_its_parts_it_refuses_and_without_others_it_is_made(monkeypatch, name):
    parts = parts_of(name)
    for part, hooks in NAMES.items():
        gone = next(hook for hook in hooks if not hook.optional)
        _take(monkeypatch, gone)
        FOUND.clear()
        if part in parts:
            with pytest.raises(ImportError, match=f"cannot work with .*:{gone.path} is missing .*Known to work: keras"):
                make(name)
        elif not CASES[name].called:
            make(name)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.path}")
def test_its_part_looks_for_each_name(monkeypatch, hook):
    _take(monkeypatch, hook)
    for part, hooks in NAMES.items():
        FOUND.clear()
        if hook not in hooks or hook.optional:
            check_internals(part)
            continue
        with pytest.raises(ImportError, match=f"{hook.module}:{hook.path} is missing"):
            check_internals(part)


EVERY_FIT = {"models", "steps", "data"}
# The plans of several processes: the hardware, the options, and the parts that are looked for.
CLUSTERS = {
    "workers": (describe(workers=2), {"strategy": "multi_worker"}, EVERY_FIT | {"replicas", "workers"}),
    "a mesh on workers": (
        describe(workers=2),
        {"mesh": {"batch": 2, "model": 1}, "layout": "auto"},
        EVERY_FIT | {"memory", "meshes", "workers"},
    ),
    "parameter servers": (describe(workers=2, ps=1), {"strategy": "parameter_server", "exact": False}, EVERY_FIT),
}


def _plan_for(monkeypatch, hardware, options, strategies):
    """A `DistributedFit` that finds other hardware, and has `strategies` in place of what connects to the cluster."""
    monkeypatch.setattr("keras_paragrad.distribution.fit.detect", lambda: hardware)
    for parallelism in (DataParallel, MeshParallel, ParameterServers):
        monkeypatch.setattr(parallelism, "strategy", strategies)
    FOUND.clear()
    return DistributedFit(jit=False, **options)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_plan_for_several_processes_looks_for_their_parts_before_it_connects(monkeypatch, cluster):
    hardware, options, parts = CLUSTERS[cluster]
    found = []

    def connect(*_):
        found.append(set(check.FOUND))
        return Strategies.same(tf.distribute.get_strategy())

    _plan_for(monkeypatch, hardware, options, connect)
    assert found == [parts] == [check.FOUND]


@pytest.mark.parametrize("hook", NAMES["workers"], ids=lambda hook: hook.path)
@pytest.mark.parametrize("cluster", ["workers", "a mesh on workers"])
def test_without_a_name_of_workers_a_plan_for_them_refuses_before_it_connects(monkeypatch, cluster, hook):
    hardware, options, _ = CLUSTERS[cluster]
    _take(monkeypatch, hook)
    with pytest.raises(ImportError, match=f"{hook.path} is missing .needed for workers"):
        _plan_for(monkeypatch, hardware, options, lambda *_: pytest.fail("it connects"))


@pytest.mark.long
def test_workers_train_without_the_names_of_other_parts():
    for difference, parts in own_process.on_workers(parts_on_clusters.on_a_worker, None, seconds=120):
        assert difference < TOLERANCE
        assert set(parts) == CLUSTERS["workers"][2]


@pytest.mark.long
def test_a_parameter_server_trains_without_the_names_of_other_parts():
    ((difference, parts),) = own_process.call(parts_on_clusters.with_a_server, None, [{}], seconds=120)
    assert difference < TOLERANCE
    assert set(parts) == EVERY_FIT


def test_every_part_is_used_by_a_component():
    assert frozenset().union(*map(parts_of, CASES)) | CLUSTERS["workers"][2] == NAMES.keys()


def test_what_is_taken_away_is_missed():
    made = make("microbatch")
    with taken_away.without({"models"}), pytest.raises((AttributeError, ImportError), match="_taken_away|is missing"):
        CASES["microbatch"].run(made)
