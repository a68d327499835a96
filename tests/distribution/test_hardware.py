"""What is here is found without starting TensorFlow up, and without crashing where there is no accelerator."""

import json
import os
import socket
import textwrap

import pytest
import tensorflow as tf
from runner import own_process

from keras_paragrad.distribution.hardware import Device, detect, memory_by_name

pytestmark = pytest.mark.fast


def in_a_process(code, **environment):
    """Runs code where TensorFlow has been imported, and nothing has been set up yet."""
    own_process.call(exec, textwrap.dedent(code), [environment], seconds=120)


def test_finds_the_two_devices_of_the_tests():
    found = detect({})
    assert [device.name for device in found.devices] == ["CPU:0", "CPU:1"]
    assert found.gpus == ()
    assert found.cluster is None
    assert not found.has_virtual_gpus
    assert found.cpu_count >= 1
    assert found.memory_bytes > 2**28


def test_the_cluster_is_that_of_the_environment():
    environment = {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"}
    assert detect(environment).worker_count == 2
    with pytest.raises(ValueError, match="SM_CURRENT_HOST"):
        detect({**environment, "SM_CURRENT_HOST": "c"})


def test_tensorflow_can_still_be_set_up_afterwards():
    """Logical devices, and the multi-worker strategy, which refuses once TensorFlow has begun to run."""
    code = """
        import tensorflow as tf
        from keras_paragrad.distribution.hardware import detect
        before = detect({})
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
        after = detect({})
        assert [len(before.devices), len(after.devices)] == [1, 3], (before, after)
        assert [device.name for device in after.devices] == ["CPU:0", "CPU:1", "CPU:2"]
        assert len(tf.config.list_logical_devices()) == 3
        assert detect({}) == after
    """
    in_a_process(code)
    code = """
        from keras_paragrad.distribution.hardware import detect
        import tensorflow as tf
        detect()
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        assert strategy.num_replicas_in_sync == 1
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = {"cluster": {"worker": [f"127.0.0.1:{port}"]}, "task": {"type": "worker", "index": 0}}
    in_a_process(code, TF_CONFIG=json.dumps(config))


class Visible:
    """TensorFlow's answers on a machine that isn't here."""

    def __init__(self, gpus=0, parts=None):
        self.names = {"CPU": ["cpu"], "GPU": [f"gpu{n}" for n in range(gpus)]}
        self.parts = parts or {}

    def install(self, monkeypatch):
        details = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: self.names[kind])
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda name: self.parts.get(name))
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda name: details)


def fake_nvidia_smi(tmp_path, monkeypatch, script):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_gpus_with_their_memory(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H100, 81559'; echo 'NVIDIA H100, 81559'")
    Visible(gpus=2).install(monkeypatch)
    found = detect({})
    expected = [Device(f"GPU:{n}", "GPU", 81559 * 2**20, (9, 0), "NVIDIA H100") for n in range(2)]
    assert list(found.gpus) == list(found.of_kind("GPU")) == expected


def test_parts_of_a_gpu(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "exit 1")
    part = tf.config.LogicalDeviceConfiguration(memory_limit=1000)
    Visible(gpus=2, parts={"gpu0": [part, part]}).install(monkeypatch)
    found = detect({})
    assert [device.name for device in found.of_kind("GPU")] == ["GPU:0", "GPU:1", "GPU:2"]
    assert [device.memory_bytes for device in found.of_kind("GPU")] == [1000 * 2**20, 1000 * 2**20, None]
    assert found.has_virtual_gpus


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param("echo 'A, 10'; echo 'B, 20'; echo 'A, 10'", {"A": 10 * 2**20, "B": 20 * 2**20}, id="two-models"),
        pytest.param("echo 'A, 10'; echo 'A, 20'; echo 'B, 5'", {"B": 5 * 2**20}, id="two-sizes-of-a-model"),
        pytest.param("echo 'A, [N/A]'", {}, id="not-told"),
        pytest.param("exit 9", {}, id="failure"),
    ],
)
def test_memory_by_name(tmp_path, monkeypatch, script, expected):
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert memory_by_name() == expected


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory_by_name() == {}
