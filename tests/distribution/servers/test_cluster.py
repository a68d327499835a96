"""Clusters of several processes: launched, told to end, and with members that are killed."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keras_paragrad.distribution.launch.tasks import Layout

MEMBER = Path(__file__).with_name("member.py")
UPDATES = 250  # In an epoch of 4000 examples, 16 in a batch.
SECONDS = 150


class Members:
    """The processes of a cluster."""

    def __init__(self, epochs: int):
        self.epochs = epochs
        self.tasks = {task.label: task for task in Layout(workers=2, servers=1).tasks(os.environ)}
        self.running = {label: self.start(label) for label in self.tasks}

    def start(self, label: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-P", str(MEMBER), str(self.epochs)],
            env=dict(self.tasks[label].environment),
            stdout=subprocess.PIPE if label == "chief" else subprocess.DEVNULL,
            stderr=subprocess.PIPE if label == "chief" else subprocess.DEVNULL,
            text=True,
        )

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()


@pytest.fixture
def members():
    with contextlib.ExitStack() as stack:

        def start(epochs: int) -> Members:
            members = Members(epochs)
            stack.callback(members.end)
            return members

        yield start


def after_it_runs(members: Members):
    """Waits until the chief is in the middle of the second epoch."""
    chief = members.running["chief"]
    lines = [chief.stdout.readline().strip() for _ in range(3)]
    assert [line.split()[0] for line in lines] == ["running", "epoch", "running"], (lines, chief.stderr.read()[-3000:])
    return chief


def test_a_launched_cluster_trains(tmp_path):
    command = [sys.executable, "-P", "-m", "keras_paragrad", "launch", "--workers", "2", "--ps", "1", str(MEMBER), "2"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [line for line in finished.stdout.splitlines() if "running" not in line] == [
        f"[chief] epoch 0 updates {UPDATES} examples 4000",
        f"[chief] epoch 1 updates {2 * UPDATES} examples 4000",
        "[chief] falls True",
    ]


def test_members_that_serve_end_well_when_told(members):
    cluster = members(epochs=1)
    out, err = cluster.running["chief"].communicate(timeout=SECONDS)
    assert cluster.running["chief"].returncode == 0, err[-3000:]
    for label in ("worker 0", "worker 1", "ps 0"):
        cluster.running[label].send_signal(signal.SIGTERM)
        assert cluster.running[label].wait(20) == 0, label


@pytest.mark.parametrize("comes_back", [True, False], ids=["it comes back", "it stays away"])
def test_a_killed_worker_costs_no_example(members, comes_back):
    cluster = members(epochs=3)
    chief = after_it_runs(cluster)
    cluster.running["worker 1"].kill()
    cluster.running["worker 1"].wait()
    if comes_back:
        cluster.running["worker 1"] = cluster.start("worker 1")
    out, err = chief.communicate(timeout=SECONDS)
    assert chief.returncode == 0, err[-3000:]
    epochs = [line.split() for line in out.splitlines() if line.startswith("epoch")]
    assert [words[-1] for words in epochs] == ["4000", "4000"]
    # The step that the worker had begun is taken again by another, and may have reached the weights before.
    for words, whole in zip(epochs, (2 * UPDATES, 3 * UPDATES), strict=True):
        assert int(words[3]) - whole in (0, 1)


def test_a_killed_server_ends_training_with_the_reason(members):
    cluster = members(epochs=3)
    chief = after_it_runs(cluster)
    cluster.running["ps 0"].kill()
    out, err = chief.communicate(timeout=SECONDS)
    assert chief.returncode == 1
    assert "RuntimeError: A parameter server is gone" in err
    assert "go on from a backup" in err
