"""One process of a gang, run by its guard, and where the processes print.

The first process of a machine prints where the launcher does; each of the others has a file.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console
from rich.text import Text

from keras_paragrad.distribution.launch import guard
from keras_paragrad.distribution.launch.tasks import SAVED, Task

# How much of a failed process's file is shown.
_LINES, _BYTES = 30, 1 << 16


class Output:
    """The launcher's messages, and the files of the processes that don't print where it does.

    Attributes:
        saved: The path of a file that a process makes once it has written a backup.
    """

    def __init__(self, directory: str | None = None):
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="keras_paragrad_launch_"))
        self._directory = Path(directory or self._temporary)
        self.saved = self._temporary / "saved"
        self._write_lock = threading.Lock()
        console = Console(file=sys.stderr)
        with console.capture() as written:
            console.print(Text("[launch]", "bold"), end=" ")
        self._prefix = written.get()

    def file(self, task: Task) -> Path:
        """The file of a task's output and errors, of all its starts."""
        return self._directory / f"{task.label.replace(' ', '-')}.log"

    def say(self, message: str) -> None:
        """Prints a message of the launcher to standard error."""
        self._write(f"{self._prefix}{message}\n".encode("utf-8", "surrogateescape"))

    def show_end(self, task: Task) -> None:
        """Prints the last lines of a task's file, if it has one."""
        if not (path := self.file(task)).exists():
            return
        self.say(f"the end of {path}:")
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BYTES))
            self._write(b"".join(line + b"\n" for line in file.read().splitlines()[-_LINES:]))

    def close(self, *, failed: bool) -> None:
        """Removes the temporary directory, except the files of a run that failed."""
        self.saved.unlink(missing_ok=True)
        if not failed:
            shutil.rmtree(self._temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._temporary.rmdir()

    def _write(self, data: bytes) -> None:
        # Bypass Python's buffer, which would retry a failed write at exit.
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(sys.stderr.fileno(), data) :]


class Member:
    """A process that runs a task.

    Attributes:
        task: The task.
        status: Its exit status, or minus the signal that killed it; `None` while it runs, or if its guard was killed,
            which also kills the process.
        seconds: How long it ran.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        first: bool,
        grace: float,
        output: Output,
        on_ended: Callable[["Member"], None],
        on_overdue: Callable[["Member"], None],
    ):
        self.task = task
        self.status: int | None = None
        self.seconds = 0.0
        self._pid: int | None = None
        self._file = None if first else output.file(task)
        self._say = output.say
        self._on_ended = on_ended
        self._on_overdue = on_overdue
        self._started = time.monotonic()
        # For the guard's reports.
        reads, writes = os.pipe()
        with contextlib.nullcontext() if self._file is None else self._file.open("ab") as file:
            # Isolated from user code, and without this package, which is slow to import.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(writes), str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                bufsize=0,
                pass_fds=(writes,),
                start_new_session=True,
                env={**task.environment, SAVED: str(output.saved)},
            )
        os.close(writes)
        self._orders = cast(IO[bytes], self._guard.stdin)
        threading.Thread(target=self._listen, args=(os.fdopen(reads),), daemon=True).start()

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
        # `_listen` handles a dead guard.
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(order)

    def _listen(self, report: TextIO) -> None:
        """Reads the guard's reports until it ends; runs in a thread."""
        with report:
            for line in report:
                self._handle_report(*line.split())
        self.seconds = time.monotonic() - self._started
        # The guard was killed before it could report, and the process may still run.
        if self.status is None:
            self.destroy()
        self._guard.wait()
        self._on_ended(self)

    def _handle_report(self, word: str, number: str = "") -> None:
        """Handles a report: `started <pid>`, `overdue` or `ended <status>`."""
        if word == "started":
            self._pid = int(number)
            where = "" if self._file is None else f", and prints to {self._file}"
            self._say(f"{self.task.label} is process {number}{where}")
        elif word == "overdue":
            self._on_overdue(self)
        else:
            self.status = int(number)
