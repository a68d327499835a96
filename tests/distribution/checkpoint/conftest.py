"""Two workers, in processes of their own on this machine, with a time limit."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 150


class Ended(NamedTuple):
    """How one worker ended."""

    status: int
    printed: str
    notes: dict
    seconds: float


class Gang:
    """Runs two workers until both have ended."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, name: str, tasks: list[dict]) -> list[Ended]:
        addresses = _free_addresses(len(tasks))
        reports = [self.folder / f"{name}-{index}.jsonl" for index in range(len(tasks))]
        workers, started = [], time.monotonic()
        with ExitStack() as stack:
            for index, (task, report) in enumerate(zip(tasks, reports, strict=True)):
                path = report.with_suffix(".task")
                path.write_text(json.dumps({**task, "report": str(report)}))
                workers.append(stack.enter_context(_started(path, addresses, index)))
                stack.callback(workers[-1].kill)
            printed, seconds = [], []
            for worker in workers:
                printed.append(worker.communicate(timeout=SECONDS)[0])
                seconds.append(time.monotonic() - started)
        statuses = [worker.returncode for worker in workers]
        return [Ended(*each) for each in zip(statuses, printed, map(_notes, reports), seconds, strict=True)]


def _started(task: Path, addresses: list[str], index: int) -> subprocess.Popen:
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    path = os.pathsep.join([str(WORKER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", str(WORKER), str(task)],
        env={**os.environ, "TF_CONFIG": json.dumps(cluster), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _notes(report: Path) -> dict:
    lines = report.read_text().splitlines() if report.exists() else []
    return {name: value for line in lines for name, value in json.loads(line).items()}


def _free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


@pytest.fixture(scope="session")
def gang(tmp_path_factory) -> Gang:
    return Gang(tmp_path_factory.mktemp("gang"))
