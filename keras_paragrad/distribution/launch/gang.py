"""A gang: processes of one machine that start and end together, and where they print.

A member is one of them. A node is one of several machines, each with its own gang; after a failure, or when a machine
joins, all meet again and start new gangs.
"""

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_paragrad.distribution.launch.nodes import MEETS_AGAIN, NodeEnded
from keras_paragrad.distribution.launch.tasks import SAVED, Task

# How much of a failed process's file is shown.
_LINES, _BYTES = 30, 1 << 16
# Of Linux: the signal that a process gets when the thread that started it ends.
_SET_PARENT_DEATH_SIGNAL = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Output:
    """The launcher's messages, and the files of the processes that don't print where it does.

    The first process of a machine prints where the launcher does; each of the others has a file. A process makes the
    file `saved` once it has written a backup.
    """

    def __init__(self, directory: str | None = None):
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="keras_paragrad_launch_"))
        self._directory = Path(directory or self._temporary)
        self.saved = self._temporary / "saved"
        self._write_lock = threading.Lock()
        self._prefix = "\x1b[1m[launch]\x1b[0m" if sys.stderr.isatty() else "[launch]"

    def file(self, task: Task) -> Path:
        """The file of a task's output and errors, of all its starts."""
        return self._directory / f"{task.label.replace(' ', '-')}.log"

    def say(self, message: str) -> None:
        """Prints a message of the launcher to standard error."""
        self._write(f"{self._prefix} {message}\n".encode("utf-8", "surrogateescape"))

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
    """A process that runs a task; what is left of its process group ends with it.

    Attributes:
        task: The task.
        status: Its exit status, or minus the signal that killed it, once it has ended.
        seconds: How long it ran.
    """

    def __init__(
        self, task: Task, command: Sequence[str], output: Output, on_ended: Callable[["Member"], None], *, first: bool
    ):
        self.task, self.status, self.seconds = task, 0, 0.0
        self._on_ended, self._started = on_ended, time.monotonic()
        path = None if first else output.file(task)
        with contextlib.nullcontext() if path is None else path.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_launcher,  # noqa: PLW1509 - it calls the kernel alone
                env={**task.environment, SAVED: str(output.saved)},
            )
        output.say(f"{task.label} is process {self._process.pid}{'' if path is None else f', and prints to {path}'}")
        threading.Thread(target=self._wait, daemon=True).start()

    def terminate(self) -> None:
        """Sends SIGTERM to the process alone: it may need its children to save its state."""
        self._process.terminate()

    def kill(self) -> None:
        """Kills the process and its children."""
        # macOS refuses to signal a group in which only a zombie is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self) -> None:
        """Waits for the process, and ends its remaining children; runs in a thread."""
        self.status = self._process.wait()
        self.seconds = time.monotonic() - self._started
        self.kill()
        self._on_ended(self)


def _die_with_launcher() -> None:
    """Has Linux kill the process if the launcher is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """Event: a member has ended."""

    member: Member


@dataclass(frozen=True)
class Signalled:
    """Event: the launcher received a signal."""

    number: int


@dataclass(frozen=True)
class Resize:
    """Event: the gang is to end with a backup, so that another one can go on with more workers.

    Attributes:
        gang: The number of the gang.
        reason: Why.
    """

    gang: int
    reason: str


Events = queue.SimpleQueue[Ended | Signalled | Resize | NodeEnded]


class Gang:
    """Runs tasks until all have ended; terminates all when one fails or the launcher receives a signal.

    It ends with its chief, or without one with its workers; other tasks serve them. Events about gangs of other numbers
    are ignored. `on_failure` is told the exit status, the reason, and whether this machine won't meet the others again.

    Attributes:
        status: The failed member's exit status, by the shell's convention (128 plus the signal that killed
            it); 128 plus the signal that the launcher received; `MEETS_AGAIN`; or 0.
        signalled: Whether the launcher received a signal.
        failed: The task that failed, if one of this machine did.
        killed: Whether that was killed by a signal, and so had no time for a backup.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        command: Sequence[str],
        grace: float,
        output: Output,
        events: Events,
        number: int = 0,
        on_failure: Callable[[int, str, bool], None] = lambda status, reason, leaves: None,
    ):
        self._on_failure = on_failure
        self.status = 0
        self.signalled = False
        self.failed: Task | None = None
        self.killed = False
        self._number, self._grace, self._output, self._events = number, grace, output, events
        # Whether the gang is being ended; in order to be resized; and whether a member then ended before it was done.
        self._ending = self._resizing = self._cut_short = False
        # When members that were told to end are killed.
        self._deadline: float | None = None
        # Whether a worker, here or elsewhere, has ended well: then a larger gang would have nothing left to do.
        self._is_done = False
        self._interrupts = 0
        self._leading_job = "chief" if any(task.job == "chief" for task in tasks) else "worker"
        self._running = [
            Member(task, command, output, lambda member: events.put(Ended(member)), first=task is tasks[0])
            for task in tasks
        ]

    def run(self) -> int:
        """Handles events until all members have ended; returns `status`."""
        while self._running:
            try:
                left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0)
                event = self._events.get(timeout=left)
            except queue.Empty:
                self._deadline = None
                for member in self._running:
                    self._output.say(f"{member.task.label} did not exit within {self._grace:g} s and is killed")
                    member.kill()
                continue
            if isinstance(event, Signalled):
                self._forward(event.number)
            elif isinstance(event, NodeEnded):
                self._handle_node(event)
            elif isinstance(event, Resize):
                if event.gang == self._number:
                    self._resize(event.reason)
            else:
                self._handle_exit(event.member)
        # If all members ended with status 0, training is done.
        if self._resizing and self._cut_short and not self.signalled:
            self.status = MEETS_AGAIN
        return self.status

    def _handle_exit(self, member: Member) -> None:
        """Ends the gang if a member failed, or once no process of the leading job runs."""
        self._running.remove(member)
        if self._ending:
            self._cut_short |= member.status != 0
            return
        if member.status != 0:
            self.failed, self.killed = member.task, member.status < 0
            self.status = 128 - member.status if self.killed else member.status
            took = f"{member.seconds:.1f} s" if member.seconds < 10 else f"{member.seconds:.0f} s"
            failure = f"{member.task.label} {_describe_exit(member.status)} after {took}"
            self._on_failure(self.status, failure, False)
            self._end_others(failure)
            self._output.show_end(member.task)
        else:
            self._is_done = True
        if not self._ending and not any(other.task.job == self._leading_job for other in self._running):
            self._end()

    def _handle_node(self, ended: NodeEnded) -> None:
        """Ends the gang if another machine's has failed, or if all meet again."""
        if ended.gang != self._number or self._ending:
            return
        if ended.status == MEETS_AGAIN:
            self._resize(ended.reason)
        elif ended.status:
            self.status = ended.status
            failure = f"node {ended.node}: {ended.reason}"
            # Tell the first machine that this one is still there, and will join the next rendezvous.
            self._on_failure(self.status, failure, False)
            self._end_others(failure)
        else:
            self._is_done = True

    def _resize(self, reason: str) -> None:
        """Ends the gang by SIGTERM, at which its members make a backup."""
        if not self._ending and not self._is_done:
            self._resizing = True
            self._on_failure(MEETS_AGAIN, reason, False)
            self._output.say(f"{reason}: all make a backup, and go on together")
            self._end()

    def _end_others(self, failure: str) -> None:
        """Reports a failure and terminates the other members."""
        if self._running:
            names = ", ".join(member.task.label for member in self._running)
            failure += f"; stopping {names}: SIGTERM, then SIGKILL after {self._grace:g} s"
        self._output.say(failure)
        self._end()

    def _end(self) -> None:
        """Terminates all members that still run."""
        self._ending, self._deadline = True, time.monotonic() + self._grace
        for member in self._running:
            member.terminate()

    def _forward(self, number: int) -> None:
        """Ends the gang, once, by SIGTERM, at which its members make a backup; kills on the second SIGINT."""
        self._interrupts += number == signal.SIGINT
        # A signal during a resize ends the launcher as well.
        if not self._ending or (self._resizing and not self.signalled):
            self.status = 128 + number
            if not self._ending:
                self._end()
            name = signal.Signals(number).name
            self._on_failure(self.status, f"received {name}", True)
            self._output.say(f"received {name}; what still runs after {self._grace:g} s is killed")
        elif self._interrupts > 1:
            for member in self._running:
                member.kill()
        self.signalled = True


def _describe_exit(status: int) -> str:
    """How a failed member ended, by its status, as the end of a sentence."""
    if status > 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
