"""A training by machines that come and go: launchers on addresses of loopback, killed, told to leave, started again."""

import collections
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

# Of a result from what is expected; raises if it is too large.
Difference = Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], float]
# Until all have ended that nobody disturbs any longer, on a busy machine.
ENDED = 600
# Of the command line: at once a machine is lost whose launcher is killed, and within the grace period its workers.
OPTIONS = ("--nodes=1:3", "--max-restarts=1000", "--wait=300", "--grace-seconds=20")


class Machines:
    """One training by up to three machines, whose number changes at random.

    Attributes:
        said: What was done to them.
        sizes: How many workers each world had.
    """

    def __init__(self, kind: str, folder: Path, draw: random.Random, events: int, difference: Difference):
        self.kind, self.folder, self._draw, self._events = kind, folder, draw, events
        self._difference = difference
        folder.mkdir(parents=True)
        self.said: list[str] = []
        self._launchers: dict[int, subprocess.Popen] = {}
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self._rendezvous = f"127.0.0.2:{free.getsockname()[1]}"

    @property
    def sizes(self) -> list[int]:
        """How many workers each world had, as the first machine said."""
        said = self._output(0).read_text(errors="replace") if self._output(0).exists() else ""
        return list(map(int, re.findall(r" joined, with (\d+) worker", said)))

    def run(self, expected: dict[str, np.ndarray]) -> float:
        """Trains until it is done, and returns how far its end is from what is expected.

        Raises:
            AssertionError: A machine ended otherwise than it should have, or with something else.
        """
        try:
            for rank in range(self._draw.randint(1, 3)):
                self._start(rank)
            while len(self.said) < self._events and not self._is_done():
                self._let_train(self._draw.uniform(4, 25))
                self._disturb()
            if not self._is_done():
                for rank in set(range(3)) - set(self._launchers):
                    self._start(rank)
            self._wait_for_all()
        finally:
            for launcher in self._launchers.values():
                launcher.kill()
                launcher.wait()
        results = [dict(np.load(path)) for path in self.folder.glob("result-*.npz")]
        assert results, "nobody was done"
        assert not list(self.folder.glob("backups/*")), "backups are left"
        return max(self._difference(result, expected) for result in results)

    def _start(self, rank: int) -> None:
        task = {
            "kind": self.kind,
            "backups": str(self.folder / "backups"),
            "result": str(self.folder / "result"),
            "pace": 0.2,
        }
        words = [*OPTIONS, f"--node-rank={rank}", f"--node-address=127.0.0.{2 + rank}"]
        words += [
            f"--rendezvous={self._rendezvous}",
            str(Path(__file__).with_name("run.py")),
            "--work",
            json.dumps(task),
        ]
        environment = {
            **os.environ,
            "KERAS_PARAGRAD_TOKEN": "0123456789abcdef",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with self._output(rank).open("ab") as output:
            self._launchers[rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", "keras_paragrad", "launch", *words],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def _disturb(self) -> None:
        """Does something to one of the machines, or has one come."""
        missing = sorted(set(range(3)) - set(self._launchers))
        if missing and (not self._launchers or self._draw.random() < 0.4):
            rank = self._draw.choice(missing)
            self._start(rank)
            self.said.append(f"machine {rank} comes")
            return
        rank = self._draw.choice(sorted(self._launchers))
        launcher = self._launchers[rank]
        what = self._draw.choice(("machine lost", "told to leave", "worker killed", "slow"))
        if launcher.poll() is not None:
            return
        if what == "machine lost":
            launcher.kill()
            launcher.wait()
            del self._launchers[rank]
        elif what == "told to leave":
            launcher.terminate()
            assert launcher.wait(60) in (0, 143), f"machine {rank}, told to leave, ended with {launcher.returncode}"
            del self._launchers[rank]
        else:
            workers = self._workers(launcher)
            if not workers:
                return
            # It may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                if what == "worker killed":
                    workers[0].kill()
                else:
                    workers[0].suspend()
                    time.sleep(3)
                    workers[0].resume()
        self.said.append(f"{what}: {rank}")

    @staticmethod
    def _workers(launcher: subprocess.Popen) -> list[psutil.Process]:
        """The processes that train."""
        try:
            return psutil.Process(launcher.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _let_train(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._is_done():
            time.sleep(0.2)

    def _is_done(self) -> bool:
        return any(launcher.poll() is not None for launcher in self._launchers.values())

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + ENDED
        statuses = collections.Counter[int]()
        for rank, launcher in self._launchers.items():
            try:
                statuses[launcher.wait(max(deadline - time.monotonic(), 1))] += 1
            except subprocess.TimeoutExpired:
                raise AssertionError(f"machine {rank} did not end:\n{self._tail(rank)}") from None
        tails = "\n".join(map(self._tail, self._launchers))
        assert statuses.keys() == {0}, f"machines ended with {dict(statuses)}:\n{tails}"

    def _output(self, rank: int) -> Path:
        return self.folder / f"machine-{rank}.txt"

    def _tail(self, rank: int) -> str:
        return self._output(rank).read_text(errors="replace")[-2000:]
