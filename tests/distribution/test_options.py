"""Arguments are checked where they are given, and the message says what to write instead."""

import dataclasses

import pytest
import tensorflow as tf
from trainings import every_component
from trainings.auto_strategies import auto_strategy

from keras_paragrad import DistributedFit
from keras_paragrad.distribution.options import Options, kind_of_strategy

pytestmark = pytest.mark.fast


def test_nothing_has_to_be_said():
    options = Options()
    assert {field.name: getattr(options, field.name) for field in dataclasses.fields(options)} == {
        "strategy": "auto",
        "devices": None,
        "jit": "auto",
        "exact": True,
        "weighting": "auto",
        "prove": True,
        "deterministic": False,
        "shard_policy": "data",
        "startup_timeout": 60.0,
        "shard": None,
        "min_shard_bytes": 2**14,
        "fit_memory": False,
        "device_bytes": None,
        "mesh": None,
        "layout": None,
    }
    assert options.given is None


def test_options_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().jit = True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param({"strategy": "horovod"}, "`strategy` is 'horovod', and must be 'auto', 'none'", id="strategy"),
        pytest.param({"strategy": None}, "`strategy` is None", id="no-strategy"),
        pytest.param({"strategy": tf.distribute.MirroredStrategy}, "pass a tf.distribute.Strategy", id="a-class"),
        pytest.param({"devices": "CPU:0"}, r"Write devices=\['CPU:0', 'CPU:1'\]", id="devices-not-a-list"),
        pytest.param({"devices": 2}, "`devices` is 2", id="devices-a-number"),
        pytest.param({"devices": []}, "`devices` is empty", id="no-devices"),
        pytest.param({"devices": ["CPU"]}, r"`devices\[0\]` is 'CPU'", id="device-without-number"),
        pytest.param({"devices": [0]}, r"`devices\[0\]` is 0", id="device-a-number"),
        pytest.param({"devices": ["CPU:0", "/cpu:0"]}, r"\['CPU:0'\] more than once", id="device-twice"),
        pytest.param({"devices": ["CPU:0", "GPU:0"]}, "of several kinds", id="devices-of-two-kinds"),
        pytest.param(
            {"devices": ["CPU:0", "CPU:1"], "strategy": "one_device"},
            'names 2. Name one of them, or write strategy="mirrored"',
            id="one-device-and-two",
        ),
        pytest.param({"devices": ["CPU:0"], "strategy": "none"}, "takes no devices", id="none-with-devices"),
        pytest.param({"strategy": "tpu"}, "`strategy` is 'tpu', and must be", id="tpu"),
        pytest.param(
            {"devices": ["CPU:0"], "strategy": "parameter_server"}, "takes no devices", id="servers-with-devices"
        ),
        pytest.param({"jit": "yes"}, "`jit` is 'yes', and must be 'auto', True or False", id="jit"),
        pytest.param({"jit": 1}, "`jit` is 1", id="jit-a-number"),
        pytest.param({"exact": "yes"}, "`exact` is 'yes'", id="exact"),
        pytest.param({"shard_policy": "AUTO"}, "`shard_policy` is 'AUTO', and must be 'data'", id="shards"),
        pytest.param({"startup_timeout": 0}, "`startup_timeout` is 0, and must be a finite", id="timeout"),
        pytest.param({"startup_timeout": float("nan")}, "`startup_timeout` is nan", id="timeout-not-a-number"),
    ],
)
def test_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Options(**arguments)


@pytest.mark.parametrize("name", ["CPU:1", "cpu:1", "/cpu:1", "/device:CPU:1", "device:cpu:01"])
def test_devices_are_named_in_one_way(name):
    assert Options(devices=[name]).devices == ("CPU:1",)


@pytest.mark.own_process(seconds=120)
def test_strategies_that_are_handed_over():
    given = {
        "none": tf.distribute.get_strategy(),
        "one_device": tf.distribute.OneDeviceStrategy("CPU:0"),
        "mirrored": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        "multi_worker": tf.distribute.MultiWorkerMirroredStrategy(),
    }
    assert {kind_of_strategy(strategy): strategy for strategy in given.values()} == given
    assert Options(strategy=given["mirrored"]).given is given["mirrored"]
    with pytest.raises(ValueError, match="MirroredStrategy, which was created with its own devices"):
        Options(strategy=given["mirrored"], devices=["CPU:0"])


@pytest.mark.long
@pytest.mark.own_process(seconds=120)
def test_what_tensorflow_chooses_is_taken():
    """On several workers, `tests/workers/grain_worker.py` trains with it."""
    every = tf.distribute.MirroredStrategy([each.name for each in tf.config.list_logical_devices("CPU")])
    for strategy, kind in ((auto_strategy(), "one_device"), (every, "mirrored")):
        dist = DistributedFit(strategy=strategy, jit=False)
        assert dist.plan.strategy.value == kind
        with dist.scope():
            model = every_component.network()
        every_component.train(model, fit=lambda *arguments, fit=dist.fit, **options: fit(*arguments, **options))
        assert every_component.from_whole(model) < 1e-6


@pytest.mark.own_process(seconds=120)
def test_central_storage_is_refused():
    with pytest.raises(ValueError, match="CentralStorageStrategy, .*metrics are wrong"):
        Options(strategy=tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]))
