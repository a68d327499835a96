"""The decision table, driven with machines that aren't here; and what can't work on them is refused."""

import contextlib
import copy
import dataclasses
import itertools
import json
import pickle

import keras
import pytest
import tensorflow as tf
from sample_models.machines import describe

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.hardware import Device, Hardware
from keras_paragrad.distribution.options import CHOICES, Decision, Options
from keras_paragrad.distribution.plan import MAY_DIFFER, make_plan

pytestmark = pytest.mark.fast

H100 = {"compute_capability": (9, 0), "gpu_memory_gb": 80}


def part(number):
    return Device(f"GPU:{number}", "GPU", 2**33, (8, 0))


def in_cluster(jobs, job, index=0, **machine):
    hosts = {name: tuple(f"{name}{task}:1" for task in range(count)) for name, count in jobs.items()}
    described = describe(**machine)
    cluster = Cluster(hosts, job, index, "TF_CONFIG")
    return Hardware(described.cpu_count, None, described.devices, described.gpus, cluster)


MACHINES = {
    "cpu": describe(cpus=8),
    "logical-cpus": describe(cpus=8, logical_cpus=4),
    "gpu": describe(gpus=1, **H100),
    "8-gpus": describe(gpus=8, **H100),
    "parts-of-a-gpu": Hardware(8, None, (Device("CPU:0", "CPU"), part(0), part(1)), (part(0),)),
    "2-workers": describe(cpus=8, logical_cpus=2, workers=2),
    "2-workers-with-gpus": describe(gpus=4, workers=2, **H100),
    "2-workers-with-parts": Hardware(
        8, None, (Device("CPU:0", "CPU"), part(0), part(1)), (part(0),), describe(workers=2).cluster
    ),
    "1-worker": in_cluster({"worker": 1}, "worker", gpus=2),
    "chief-and-worker": in_cluster({"chief": 1, "worker": 1}, "worker"),
    "evaluator": in_cluster({"worker": 2, "evaluator": 1}, "evaluator"),
    "servers": describe(cpus=8, workers=2, ps=1),
    "a-server": in_cluster({"chief": 1, "worker": 2, "ps": 1}, "ps"),
    "no-chief": in_cluster({"worker": 2, "ps": 1}, "worker"),
}
COLUMNS = ("strategy", "devices", "replicas", "communication", "jit", "shard_policy")
# fmt: off
TABLE = [
    ("cpu", {}, ("none", ("CPU:0",), 1, "none", "none", "data")),
    ("cpu", {"jit": True}, ("none", ("CPU:0",), 1, "none", "whole_step", "data")),
    ("cpu", {"strategy": "one_device"}, ("one_device", ("CPU:0",), 1, "none", "none", "data")),
    ("cpu", {"strategy": "mirrored"}, ("mirrored", ("CPU:0",), 1, "none", "none", "data")),
    ("cpu", {"strategy": "mirrored", "jit": True}, ("mirrored", ("CPU:0",), 1, "none", "whole_step", "data")),
    ("logical-cpus", {}, ("none", ("CPU:0",), 1, "none", "none", "data")),
    ("logical-cpus", {"strategy": "mirrored"},
     ("mirrored", tuple(f"CPU:{n}" for n in range(4)), 4, "one_device", "none", "data")),
    ("logical-cpus", {"devices": ["CPU:2", "CPU:0"]},
     ("mirrored", ("CPU:2", "CPU:0"), 2, "one_device", "none", "data")),
    ("logical-cpus", {"devices": ["CPU:1"]}, ("one_device", ("CPU:1",), 1, "none", "none", "data")),
    ("logical-cpus", {"devices": ["CPU:0", "CPU:1"], "jit": True},
     ("mirrored", ("CPU:0", "CPU:1"), 2, "one_device", "per_replica", "data")),
    ("gpu", {}, ("none", ("GPU:0",), 1, "none", "whole_step", "data")),
    ("gpu", {"jit": False}, ("none", ("GPU:0",), 1, "none", "none", "data")),
    ("gpu", {"devices": ["CPU:0"]}, ("one_device", ("CPU:0",), 1, "none", "none", "data")),
    ("8-gpus", {}, ("mirrored", tuple(f"GPU:{n}" for n in range(8)), 8, "nccl", "per_replica", "data")),
    ("8-gpus", {"jit": False},
     ("mirrored", tuple(f"GPU:{n}" for n in range(8)), 8, "nccl", "none", "data")),
    ("8-gpus", {"devices": ["GPU:1", "GPU:3"]},
     ("mirrored", ("GPU:1", "GPU:3"), 2, "nccl", "per_replica", "data")),
    ("8-gpus", {"strategy": "none"}, ("none", ("GPU:0",), 1, "none", "whole_step", "data")),
    ("8-gpus", {"strategy": "one_device", "devices": ["GPU:7"]},
     ("one_device", ("GPU:7",), 1, "none", "whole_step", "data")),
    ("parts-of-a-gpu", {}, ("mirrored", ("GPU:0", "GPU:1"), 2, "ring", "per_replica", "data")),
    ("2-workers", {}, ("multi_worker", ("CPU:0",), 2, "ring", "none", "data")),
    ("2-workers", {"jit": True},
     ("multi_worker", ("CPU:0",), 2, "ring", "per_replica", "data")),
    ("2-workers", {"devices": ["CPU:0", "CPU:1"], "shard_policy": "already_sharded"},
     ("multi_worker", ("CPU:0", "CPU:1"), 4, "ring", "none", "already_sharded")),
    ("2-workers", {"strategy": "none"}, ("none", ("CPU:0",), 1, "none", "none", "data")),
    ("2-workers-with-gpus", {},
     ("multi_worker", tuple(f"GPU:{n}" for n in range(4)), 8, "nccl", "per_replica", "data")),
    ("2-workers-with-gpus", {"devices": ["GPU:0"]},
     ("multi_worker", ("GPU:0",), 2, "nccl", "per_replica", "data")),
    ("2-workers-with-parts", {}, ("multi_worker", ("GPU:0", "GPU:1"), 4, "ring", "per_replica", "data")),
    ("1-worker", {}, ("mirrored", ("GPU:0", "GPU:1"), 2, "nccl", "per_replica", "data")),
    ("chief-and-worker", {}, ("multi_worker", ("CPU:0",), 2, "ring", "none", "data")),
    ("evaluator", {}, ("none", ("CPU:0",), 1, "none", "none", "data")),
    ("servers", {"exact": False}, ("parameter_server", (), 1, "none", "none", "data")),
    ("servers", {"exact": False, "strategy": "parameter_server", "jit": False},
     ("parameter_server", (), 1, "none", "none", "data")),
    ("servers", {"strategy": "none"}, ("none", ("CPU:0",), 1, "none", "none", "data")),
    ("a-server", {"exact": False}, ("parameter_server", (), 1, "none", "none", "data")),
]
# fmt: on
TABLE_IDS = [f"{name}-{','.join(f'{key}={value}' for key, value in options.items())}" for name, options, _ in TABLE]


@pytest.mark.parametrize(("machine", "options", "expected"), TABLE, ids=TABLE_IDS)
def test_the_decision_table(machine, options, expected):
    plan = make_plan(MACHINES[machine], Options(**options))
    assert tuple(getattr(plan, name).value for name in COLUMNS) == expected


@pytest.mark.parametrize(("machine", "options", "expected"), TABLE, ids=TABLE_IDS)
def test_every_decision_is_explained_and_is_data(machine, options, expected):
    plan = make_plan(MACHINES[machine], Options(**options))
    for decision in plan:
        assert isinstance(decision, Decision)
        assert all((decision.reason, decision.override)), decision
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["devices"]["value"] == list(plan.devices.value)
    assert set(data["strategy"]) == {"value", "reason", "override"}
    json.dumps(dataclasses.asdict(plan))


def test_decisions_are_named_as_they_are_asked_for():
    plan = make_plan(MACHINES["8-gpus"], Options())
    assert all(getattr(plan, decision.name) is decision for decision in plan)
    assert {*MAY_DIFFER} < {decision.name for decision in plan}
    with pytest.raises(AttributeError, match="no decision 'strategie'. Its decisions are strategy, devices"):
        _ = plan.strategie


def test_a_plan_is_a_value():
    plan = make_plan(MACHINES["8-gpus"], Options())
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert plan != make_plan(MACHINES["cpu"], Options())


@pytest.mark.parametrize(
    ("machine", "options", "says"),
    [
        pytest.param("2-workers", {"strategy": "mirrored"}, 'Write strategy="multi_worker"', id="mirrored-workers"),
        pytest.param("servers", {"strategy": "mirrored"}, 'Write strategy="parameter_server"', id="mirrored-servers"),
        pytest.param(
            "servers", {"strategy": "multi_worker"}, 'Write strategy="parameter_server"', id="workers-servers"
        ),
        pytest.param("servers", {}, "asynchronous.*Write exact=False", id="exact-servers"),
        pytest.param("no-chief", {"exact": False}, "the cluster has no chief", id="servers-without-chief"),
        pytest.param(
            "2-workers", {"strategy": "parameter_server", "exact": False}, "no chief, ps", id="servers-without-servers"
        ),
        pytest.param("cpu", {"strategy": "parameter_server", "exact": False}, "no chief, worker, ps", id="no-cluster"),
        pytest.param("cpu", {"strategy": "multi_worker"}, "there is 1.*launch --workers 2", id="workers-alone"),
        pytest.param("cpu", {"shard": "optimizer"}, "no replicas that could each hold", id="shards-alone"),
        pytest.param("cpu", {"devices": ["CPU:0", "CPU:1"]}, r"names CPU:1, .*\[.*\] \* 2", id="no-second-cpu"),
        pytest.param("8-gpus", {"devices": ["GPU:8"]}, "names GPU:8.*CUDA_VISIBLE_DEVICES", id="no-ninth-gpu"),
        pytest.param("servers", {"jit": True, "exact": False}, "parameter servers. Leave jit out", id="servers-jit"),
    ],
)
def test_what_cannot_work_is_refused(machine, options, says):
    with pytest.raises(ValueError, match=says):
        make_plan(MACHINES[machine], Options(**options))


# Values of each argument; what contradicts others comes with what it needs. A mesh is refused where a world may change.
VALUES = {
    "strategy": ["auto", "none", "one_device", "mirrored", "multi_worker", "parameter_server"],
    "devices": [["CPU:0"], ["GPU:0"], ["GPU:0", "GPU:1"]],
    **{name: CHOICES[name] for name in ("jit", "exact", "prove", "shard_policy", "shard")},
    "weighting": ["examples"],
    "deterministic": [True, 4],
    "min_shard_bytes": [{"min_shard_bytes": 8, "shard": "parameters"}],
    "fit_memory": [True, {"fit_memory": True, "shard": "optimizer"}],
    "device_bytes": [{"device_bytes": 2**30, "fit_memory": True}],
    "mesh": [],
    "layout": [],
    "startup_timeout": [60],
}


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_one_worker_that_is_left_goes_on(gpus):
    assert {*VALUES} == {field.name for field in dataclasses.fields(Options)} - {"_"}

    def decide(workers, **options):
        machine = in_cluster({"worker": workers}, "worker", gpus=gpus, logical_cpus=2)
        with contextlib.suppress(ValueError):
            return make_plan(machine, Options(**options))

    tried = []
    for name, values in VALUES.items():
        for value, base in itertools.product(values, ({}, {"strategy": "multi_worker"})):
            options = base | (value if isinstance(value, dict) else {name: value})
            plans = [decide(workers, **options) for workers in (1, 2, 3)]
            tried += [options] * (plans[2] is not None)
            assert (plans[1] is None) == (plans[2] is None), options
            if plans[1] is not None:
                assert plans[0] is not None, options
                assert gpus == 2 or (plans[0].shard.value, plans[0].replicas.value) == ("none", 1), options
    assert len(tried) > 40


def test_an_evaluator_holds_everything():
    assert make_plan(MACHINES["evaluator"], Options(shard="parameters")).shard.value == "none"


@pytest.mark.parametrize(
    ("machine", "faster"),
    [
        pytest.param(describe(), None, id="cpu"),
        pytest.param(describe(gpus=1, compute_capability=(9, 0)), "mixed_bfloat16", id="9.0"),
        pytest.param(describe(gpus=1, compute_capability=(8, 0)), "mixed_bfloat16", id="8.0"),
        pytest.param(describe(gpus=1, compute_capability=(7, 5)), "mixed_float16", id="7.5"),
        pytest.param(describe(gpus=1, compute_capability=(7, 0)), "mixed_float16", id="7.0"),
        pytest.param(describe(gpus=1, compute_capability=(6, 1)), None, id="6.1"),
        pytest.param(describe(gpus=2), None, id="capability-unknown"),
    ],
)
def test_precision_is_kept_and_a_faster_one_named(machine, faster):
    decision = make_plan(machine, Options()).precision
    assert decision.value == "float32"
    if faster:
        assert decision.override == f'keras.config.set_dtype_policy("{faster}")'
        assert f"{faster} would be faster" in decision.reason
    else:
        assert "would be faster" not in decision.reason


def test_the_least_of_several_gpus_counts():
    gpus = Device("GPU:0", "GPU", None, (9, 0)), Device("GPU:1", "GPU", None, (7, 5))
    machine = Hardware(1, None, (Device("CPU:0", "CPU"), *gpus), gpus)
    assert '"mixed_float16"' in make_plan(machine, Options()).precision.override
    assert '"mixed_bfloat16"' in make_plan(machine, Options(devices=["GPU:0"])).precision.override
    assert "would be faster" not in make_plan(machine, Options(devices=["CPU:0"])).precision.reason


def test_the_policy_that_is_set_stays():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert make_plan(MACHINES["8-gpus"], Options()).precision.value == "mixed_float16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_exactness_can_be_given_up():
    assert make_plan(MACHINES["8-gpus"], Options()).exact.value is True
    assert make_plan(MACHINES["8-gpus"], Options(exact=False)).exact.value is False
    assert make_plan(MACHINES["servers"], Options(exact=False)).exact.value is False


@pytest.mark.own_process(seconds=120)
def test_a_strategy_that_is_handed_over():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    plan = make_plan(MACHINES["logical-cpus"], Options(strategy=strategy, jit=True))
    values = tuple(getattr(plan, name).value for name in COLUMNS)
    assert values == ("mirrored", (), 2, "given", "per_replica", "data")
    assert plan.strategy.reason == "given: a MirroredStrategy"
