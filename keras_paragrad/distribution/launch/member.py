"""One process of a gang, run by its guard."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TextIO, cast

from keras_paragrad.distribution.launch import guard
from keras_paragrad.distribution.launch.output import Lines, Output
from keras_paragrad.distribution.launch.tasks import Task

# How long to wait for output after a process has ended: a process that left the group may hold the pipe open.
_LAST_WORDS_SECONDS = 2.0


class Member:
    """A process that runs a task and prints to the launcher's output.

    Args:
        task: The task.
        command: Its command line.
        number: Its index in the gang, which determines its colour.
        grace: Seconds between asking it to end and killing it.
        output: Receives its output.
        on_ended: Called with this member, in a separate thread, when the process has ended and its output was read.
        on_overdue: Called with this member when it is killed because it did not end in time.

    Attributes:
        task: The task.
        status: Its exit status, or minus the signal that killed it; `None` while it runs, and for good if its guard was
            killed, which also kills the process.
        seconds: How long it ran.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        number: int,
        grace: float,
        output: Output,
        on_ended: Callable[["Member"], None],
        on_overdue: Callable[["Member"], None],
    ):
        self.task = task
        self.status: int | None = None
        self.seconds = 0.0
        self._pid: int | None = None
        self._on_ended = on_ended
        self._on_overdue = on_overdue
        self._started = time.monotonic()
        reads, writes = os.pipe()
        # In isolated mode, so that no user code is imported, and without this package, which is slow to import.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(writes), str(grace), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(writes,),
            start_new_session=True,
            env=dict(task.environment),
        )
        os.close(writes)
        self._orders = cast(IO[bytes], self._guard.stdin)
        pumps = [
            threading.Thread(target=_pump, args=(source, target, output, output.prefix(task.label, number, target)))
            for source, target in ((self._guard.stdout, sys.stdout), (self._guard.stderr, sys.stderr))
        ]
        for thread in (*pumps, threading.Thread(target=self._listen, args=(os.fdopen(reads), pumps))):
            thread.daemon = True
            thread.start()

    def interrupt(self) -> None:
        """Sends SIGINT, like Ctrl-C, and SIGKILL after the grace period."""
        self._order(guard.INTERRUPT)

    def terminate(self) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period."""
        self._order(guard.TERMINATE)

    def kill(self) -> None:
        """Kills the process and its children."""
        self._order(guard.KILL)

    def destroy(self) -> None:
        """Kills the process directly, and its guard too."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._guard.kill()

    def close(self) -> None:
        """Releases the resources of a process that has ended."""
        self._orders.close()

    def _order(self, order: bytes) -> None:
        # A dead guard needs no orders; its death is reported elsewhere.
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(order)

    def _listen(self, report: TextIO, pumps: Sequence[threading.Thread]) -> None:
        """Reads the guard's reports until end of file."""
        with report:
            for line in report:
                self._note(*line.split())
        self.seconds = time.monotonic() - self._started
        if self.status is None:
            self.destroy()
        self._guard.wait()
        for pump in pumps:
            pump.join(_LAST_WORDS_SECONDS)
        self._on_ended(self)

    def _note(self, word: str, number: str = "") -> None:
        if word == "started":
            self._pid = int(number)
        elif word == "overdue":
            self._on_overdue(self)
        else:
            self.status = int(number)


def _pump(source: IO[bytes], target: TextIO, output: Output, prefix: str) -> None:
    """Forwards lines until the last process that could write any has ended."""
    lines = Lines()
    for data in iter(partial(os.read, source.fileno(), 1 << 16), b""):
        output.write(target, prefix, lines.feed(data))
    output.write(target, prefix, lines.close())
    source.close()
