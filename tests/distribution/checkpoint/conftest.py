"""Two workers, in processes of their own on this machine, with a time limit."""

import json
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest
from runner import own_process
from workers import backed_up_worker

SECONDS = 150


class Ended(NamedTuple):
    """How one worker ended."""

    status: int | None
    printed: str
    notes: dict


class Gang:
    """Runs two workers until both have ended."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, name: str, tasks: list[dict]) -> list[Ended]:
        paths = [self.folder / f"{name}-{index}" for index in range(len(tasks))]
        with ExitStack() as stack:
            workers = []
            for task, path, environment in zip(tasks, paths, own_process.environments_of_workers(), strict=True):
                argument = {**task, "report": f"{path}.jsonl"}
                output = path.with_suffix(".txt")
                workers.append(own_process.start(backed_up_worker.main, argument, environment, output))
                stack.callback(workers[-1].join)
                stack.callback(workers[-1].kill)
            deadline = time.monotonic() + SECONDS
            while running := [worker.sentinel for worker in workers if worker.exitcode is None]:
                assert wait(running, deadline - time.monotonic()), paths[0].with_suffix(".txt").read_text()[-6000:]
            return [Ended(worker.exitcode, *_left_by(path)) for worker, path in zip(workers, paths, strict=True)]


def _left_by(path: Path) -> tuple[str, dict]:
    report = path.with_suffix(".jsonl")
    lines = report.read_text().splitlines() if report.exists() else []
    notes = {name: value for line in lines for name, value in json.loads(line).items()}
    return path.with_suffix(".txt").read_text(errors="replace"), notes


@pytest.fixture(scope="session")
def gang(tmp_path_factory) -> Gang:
    return Gang(tmp_path_factory.mktemp("gang"))
