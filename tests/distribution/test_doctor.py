"""`doctor` says what is here, and its exit status says whether a collective works."""

import json
import sys

import pytest
from sample_models.machines import describe

from keras_paragrad.cli.main import main
from keras_paragrad.distribution import diagnosis
from keras_paragrad.distribution.diagnosis import check_sums, probed_devices, run_probe

pytestmark = pytest.mark.fast


@pytest.mark.long
@pytest.mark.not_fast
def test_a_healthy_machine(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for part in ("Python", "tensorflow", "keras_paragrad", "logical devices  CPU:0", "cluster", "strategy"):
        assert part in said
    assert "An all-reduce over CPU:0, CPU:1 gave the right sum, 3: " in said


def test_a_collective_that_does_not_end():
    assert run_probe(("CPU:0", "CPU:1"), 0.01) == (False, "did not finish within 0.01 s, and was killed")


def test_a_process_that_fails(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run_probe(("CPU:0", "CPU:1"), 120)[1].startswith("failed with exit status 1: ")


@pytest.mark.long
def test_a_collective_that_fails():
    works, outcome = run_probe(("CPU:0", "CPU:0"), 120)
    assert not works
    assert outcome.startswith("failed with exit status 1: ")


@pytest.mark.long
def test_more_devices():
    assert run_probe(tuple(f"CPU:{index}" for index in range(3)), 120)[1].startswith("gave the right sum, 6: ")


def test_wrong_sums_are_noticed():
    answer = {"least_and_most": [[3.0, 3.0], [2.0, 3.0]], "milliseconds": 1.0}
    works, outcome = check_sums(2, answer)
    assert not works
    assert "wrong sums" in outcome
    assert not check_sums(3, answer)[0]
    assert check_sums(2, {**answer, "least_and_most": [[3.0, 3.0]] * 2})[0]


def test_which_devices_meet():
    assert probed_devices(describe()) == ("CPU:0", "CPU:1")
    assert probed_devices(describe(gpus=1)) == ("CPU:0", "CPU:1")
    assert probed_devices(describe(gpus=2)) == ("GPU:0", "GPU:1")
    assert probed_devices(describe(logical_cpus=3)) == ("CPU:0", "CPU:1", "CPU:2")


SERVERS = {"cluster": {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}, "task": {"type": "chief", "index": 0}}


@pytest.mark.parametrize(
    ("tf_config", "works", "status", "says"),
    [
        pytest.param("", True, 0, "none: no TF_CONFIG", id="well"),
        pytest.param("", False, 1, "An all-reduce over CPU:0, CPU:1 was tried.", id="collective"),
        pytest.param(
            "{", True, 1, "The cluster description in the environment is malformed: TF_CONFIG", id="environment"
        ),
        pytest.param(json.dumps(SERVERS), True, 1, "DistributedFit() would refuse: Parameter servers", id="plan"),
    ],
)
def test_the_status(monkeypatch, capsys, tf_config, works, status, says):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    monkeypatch.setattr(diagnosis, "run_probe", lambda devices, seconds: (works, "was tried"))
    said = []
    assert diagnosis.diagnose(1.0, said.append) == status
    assert says in capsys.readouterr().out
    assert said[0] == "looking for devices"
    assert tf_config == "{" or said[1:] == ["trying an all-reduce over CPU:0, CPU:1, for at most 1 s"]


def test_a_machine_with_gpus_in_words():
    found = dict(diagnosis._describe(describe(gpus=2, gpu_memory_gb=80, compute_capability=(9, 0), workers=2)))
    assert found["GPUs"] == "GPU:0, 80.0 GiB, compute capability 9.0; GPU:1, 80.0 GiB, compute capability 9.0"
    assert found["cluster"] == "from TF_CONFIG: worker worker0:2222, worker1:2222"
    assert found["this task"] == "worker 0"
