"""Clusters of several processes: launched, told to end, and with members that are killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from runner import own_process
from workers import served_member

from keras_paragrad.distribution.launch.tasks import Layout

UPDATES = 100  # In an epoch of 1600 examples, 16 in a batch.
SECONDS = 150
SERVING = ("worker 0", "worker 1", "ps 0")


class Members:
    """The processes of a cluster."""

    def __init__(self, epochs: int, folder: Path):
        self.epochs, self.folder = epochs, folder
        self.tasks = {task.label: task for task in Layout(workers=2, servers=1).tasks(os.environ)}
        self.running = {}

    def start(self, label: str) -> None:
        output = self.folder / f"{label}.txt"
        environment = dict(self.tasks[label].environment)
        self.running[label] = own_process.start(served_member.main, self.epochs, environment, output)

    def start_all(self) -> None:
        for label in self.tasks:
            self.start(label)

    def lines(self) -> list[str]:
        """What the chief has reported so far."""
        path = self.folder / "chief.txt"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [line for line in lines if line.split(" ")[0] in ("running", "epoch", "falls")]

    def said(self) -> str:
        return (self.folder / "chief.txt").read_text(errors="replace")[-3000:]

    def wait_until_it_runs(self) -> None:
        """Waits until the chief is in the middle of the second epoch."""
        deadline = time.monotonic() + SECONDS
        while len(self.lines()) < 3:
            assert time.monotonic() < deadline and self.running["chief"].exitcode is None, self.said()
            time.sleep(0.02)
        assert [line.split()[0] for line in self.lines()[:3]] == ["running", "epoch", "running"], self.said()

    def kill(self, label: str) -> None:
        self.running[label].kill()
        self.running[label].join()

    def wait_for(self, label: str, seconds: float) -> int | None:
        """How the member ended."""
        assert wait([self.running[label].sentinel], seconds), f"{label} has not ended: {self.said()}"
        self.running[label].join()
        return self.running[label].exitcode

    def end(self) -> None:
        for label in self.running:
            self.kill(label)


@contextlib.contextmanager
def members(epochs: int, folder: Path):
    cluster = Members(epochs, folder)
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.end()


def check_that_no_example_is_lost(cluster: Members) -> None:
    assert cluster.wait_for("chief", SECONDS) == 0, cluster.said()
    epochs = [line.split() for line in cluster.lines() if line.startswith("epoch")]
    assert [words[-1] for words in epochs] == ["1600"] * 3
    # The step that the worker had begun is taken again by another, and may have reached the weights before.
    assert epochs[0][3] == str(UPDATES)
    for words, whole in zip(epochs[1:], (2 * UPDATES, 3 * UPDATES), strict=True):
        assert int(words[3]) - whole in (0, 1)


@pytest.fixture(scope="module")
def returned(tmp_path_factory):
    """A cluster of which a worker is killed and comes back, and which is told to end after training."""
    with members(3, tmp_path_factory.mktemp("members")) as cluster:
        cluster.wait_until_it_runs()
        cluster.kill("worker 1")
        cluster.start("worker 1")
        cluster.running["chief"].join(SECONDS)
        yield cluster


def test_a_killed_worker_that_comes_back_costs_no_example(returned):
    check_that_no_example_is_lost(returned)
    assert returned.lines()[-1] == "falls True"


def test_members_that_serve_end_well_when_told(returned):
    for label in SERVING:
        os.kill(returned.running[label].pid, signal.SIGTERM)
        assert returned.wait_for(label, 20) == 0, label


@pytest.mark.long
def test_a_killed_worker_that_stays_away_costs_no_example(tmp_path):
    with members(3, tmp_path) as cluster:
        cluster.wait_until_it_runs()
        cluster.kill("worker 1")
        check_that_no_example_is_lost(cluster)


@pytest.mark.long
def test_a_killed_server_ends_training_with_the_reason(tmp_path):
    with members(3, tmp_path) as cluster:
        cluster.wait_until_it_runs()
        cluster.kill("ps 0")
        assert cluster.wait_for("chief", SECONDS) == 1
        printed = (tmp_path / "chief.txt").read_text(errors="replace")
        assert "RuntimeError: A parameter server was lost" in printed
        assert "resume from a backup" in printed


# In `make test`, `test_parameter_servers_count_exactly` launches one.
@pytest.mark.long
def test_a_launched_cluster_trains(tmp_path):
    member = str(Path(served_member.__file__))
    command = [sys.executable, "-P", "-m", "keras_paragrad", "launch", "--workers", "2", "--ps", "1", member, "2"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [line for line in finished.stdout.splitlines() if "running" not in line] == [
        f"[chief] epoch 0 updates {UPDATES} examples 1600",
        f"[chief] epoch 1 updates {2 * UPDATES} examples 1600",
        "[chief] falls True",
    ]
