"""What a run is said to have been trained on."""

import dataclasses
import json

import pytest
import tensorflow as tf
from trainings import profiled

from keras_paragrad.profiling import log_files as module
from keras_paragrad.profiling.log_files import run_info
from keras_paragrad.profiling.summary import RunInfo

pytestmark = pytest.mark.fast

CAPABILITIES = {"GPU:0": (8, 0), "GPU:1": (7, 5), "GPU:2": None}


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs beside the processor, of which one does not say what it can do."""
    physical = [tf.config.PhysicalDevice(f"/physical_device:{name}", "GPU") for name in CAPABILITIES]
    real = tf.config.get_visible_devices
    details = {
        gpu.name: {"device_name": "a GPU", **({"compute_capability": can} if can else {})}
        for gpu, can in zip(physical, CAPABILITIES.values(), strict=True)
    }
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: physical if kind == "GPU" else real(kind))
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details[device.name])


@pytest.mark.parametrize(
    ("held_by", "kind", "capability"),
    [
        (["GPU:0"], "GPU", (8, 0)),
        (["GPU:0", "GPU:1"], "GPU", (7, 5)),
        (["GPU:0", "GPU:2"], "GPU", None),
        (["CPU:0"], "CPU", None),
        ([], "", None),
    ],
    ids=str,
)
def test_what_gpus_can_do(gpus, monkeypatch, held_by, kind, capability):
    monkeypatch.setattr(module, "_devices_of", lambda model, strategy: held_by)
    info = run_info(profiled.model())
    assert (info.device_kind, info.compute_capability) == (kind, capability)
    assert RunInfo.from_dict(json.loads(json.dumps(dataclasses.asdict(info)))) == info


def test_a_model_on_the_processor_beside_gpus(gpus):
    info = run_info(profiled.model())
    assert (info.device_kind, info.compute_capability) == ("CPU", None)


def test_replicas_hold_the_model_on_each_device():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = profiled.model()
    assert module._devices_of(model, strategy) == ["CPU:0", "CPU:1"]
