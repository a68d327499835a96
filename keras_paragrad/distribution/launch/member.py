"""One process of a gang, run by its guard, and the launcher's output: a whole line at a time."""

import codecs
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TextIO, cast

from rich.console import Console
from rich.text import Text

from keras_paragrad.distribution.launch import guard
from keras_paragrad.distribution.launch.lines import EpochLines, Errors, Kind, Shown, Tracebacks
from keras_paragrad.distribution.launch.tasks import Task

# Characters with which a progress bar returns to the start of its line.
_CARRIAGE_RETURN = re.compile("[\b]*\r")
# Lines are cut at this many characters, so that a stream without line ends can't exhaust memory.
_LONGEST = 1 << 20


class Lines:
    """Splits a process's output into lines that read well in a log.

    A line that is redrawn from its start becomes one line, in its final state; until then, its current state is
    returned at intervals.

    Args:
        interval: Seconds between two snapshots of a line that is being redrawn.
        clock: Returns the time in seconds.

    Example:

    >>> lines = Lines()
    >>> lines.feed(b"loading\\n1/3 [=  ]")
    ['loading']
    >>> lines.feed(b"\\r2/3 [== ]\\r3/3 [===]\\n")
    ['3/3 [===]']
    >>> lines.feed(b"no end"), lines.close()
    ([], ['no end'])
    """

    def __init__(self, interval: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._interval = interval
        self._clock = clock
        self._snapshot_time = clock()
        # Bytes that are not UTF-8 pass through unchanged.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Adds output; returns the lines that it completes, and a snapshot of a redrawn line if one is due."""
        *ended, rest = (self._rest + self._decoder.decode(data)).split("\n")
        lines = [*map(_final_state, ended), *self._unfinished(rest)]
        if lines:
            self._snapshot_time = self._clock()
        return lines

    def close(self) -> list[str]:
        """The last line if it has no line end."""
        last = _final_state(self._rest + self._decoder.decode(b"", final=True))
        self._rest = ""
        return [last] if last else []

    def _unfinished(self, rest: str) -> list[str]:
        """Buffers an incomplete line, and returns it if it is too long or a snapshot is due."""
        *before, last = _CARRIAGE_RETURN.split(rest)
        states = [state for state in before if state.strip()]
        redrawn = bool(states) and bool(last.strip("\b"))
        # Keep the last state until it is overwritten: the line may end here.
        self._rest = last if redrawn or not states else f"{states[-1]}\r{last}"
        if len(self._rest) > _LONGEST:
            too_long, self._rest = self._rest, ""
            return [_final_state(too_long)]
        due = self._clock() - self._snapshot_time >= self._interval
        return [_apply_backspaces(states[-1])] if redrawn and due else []


def _final_state(line: str) -> str:
    """The final state of a line in a terminal."""
    states = [state for state in _CARRIAGE_RETURN.split(line) if state.strip()]
    return _apply_backspaces(states[-1]) if states else ""


def _apply_backspaces(line: str) -> str:
    """Applies backspaces, except trailing ones."""
    characters = []
    for character in line.rstrip("\b"):
        if character == "\b":
            del characters[-1:]
        else:
            characters.append(character)
    return "".join(characters)


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Output:
    """The launcher's standard output and standard error, with lines never interleaved.

    Args:
        on_closed: Called when the reader of the output has closed it.
        all_epochs: Whether to show the lines about epochs of all workers, and not of the first alone.

    Attributes:
        errors: The distinct errors of all processes.
    """

    def __init__(self, on_closed: Callable[[], None], all_epochs: bool = False):
        self.errors = Errors()
        self.all_epochs = all_epochs
        self._on_closed = on_closed
        self._write_lock = threading.Lock()
        self._path: str | None = None
        self._diverted: int | None = None
        self._launcher_prefix = self.prefix("launch", None, sys.stderr)

    def prefix(self, label: str, number: int | None, stream: TextIO) -> str:
        """The prefix of a process's lines, coloured by its `number` (`None`: the launcher's) if the stream allows."""
        console = Console(file=stream)
        colour = "bold" if number is None else _COLOURS[number % len(_COLOURS)]
        with console.capture() as written:
            console.print(Text(f"[{label}]", colour), end=" ")
        return written.get()

    def say(self, message: str) -> None:
        """Prints a message of the launcher to standard error."""
        self._write(sys.stderr.fileno(), self._launcher_prefix, [message])

    def divert(self) -> str:
        """From now on, writes what processes print to standard error to a file, and returns its path."""
        with self._write_lock:
            if self._path is None:
                self._diverted, self._path = tempfile.mkstemp(prefix="keras_paragrad_launch_", suffix=".log")
            elif self._diverted is None:
                self._diverted = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            return self._path

    def end_run(self) -> None:
        """Ends `divert`, and names the processes whose tracebacks were not shown, as another's was."""
        with self._write_lock:
            if self._diverted is not None:
                os.close(self._diverted)
                self._diverted = None
        for sentence in self.errors.in_words():
            self.say(sentence)
        self.errors = Errors()

    def remove_file(self) -> None:
        """Removes the file of `divert`, if there is one."""
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    def write(self, prefix: str, lines: Iterable[str]) -> None:
        """Writes whole lines of a process to standard output."""
        self._write(sys.stdout.fileno(), prefix, lines)

    def write_errors(self, prefix: str, shown: Shown) -> None:
        """Writes lines of a process: new errors to standard error, all others there or where it is diverted to.

        Tracebacks that another process has printed too are only written to the diverted file.
        """
        for kind, lines in shown:
            if kind is Kind.REPEATED and self._diverted is None:
                continue
            self._write(sys.stderr.fileno() if kind is Kind.ERROR else None, prefix, lines)

    def _write(self, target: int | None, prefix: str, lines: Iterable[str]) -> None:
        """Writes lines to a file descriptor; without one, to standard error or where it is diverted to."""
        data = "".join(f"{prefix}{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        with self._write_lock:
            descriptor = target if target is not None else self._diverted
            descriptor = sys.stderr.fileno() if descriptor is None else descriptor
            try:
                # Bypass Python's buffer, which would retry a failed write at exit.
                while data:
                    data = data[os.write(descriptor, data) :]
            except BrokenPipeError:
                self._on_closed()


# Seconds to wait for output after a process has ended: a child that left the process group may keep the pipe open.
_OUTPUT_SECONDS = 2.0


class Member:
    """A process that runs a task and prints to the launcher's output.

    Args:
        task: The task.
        command: Its command line.
        number: Its index in the gang, which determines its colour.
        grace: Seconds between terminating and killing it.
        output: Receives its output.
        on_ended: Called with this member, in another thread, when the process has ended and its output was read.
        on_overdue: Called with this member when it did not end in time and is killed.

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
        # For the guard's reports.
        reads, writes = os.pipe()
        # Isolated from user code, and without this package, which is slow to import.
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
        prefixes = [output.prefix(task.label, number, stream) for stream in (sys.stdout, sys.stderr)]
        epochs = None if output.all_epochs or task.is_first else EpochLines()
        pumps = [
            threading.Thread(target=_forward_output, args=(self._guard.stdout, output, prefixes[0], epochs)),
            threading.Thread(
                target=_forward_errors,
                args=(self._guard.stderr, output, prefixes[1], Tracebacks(task.label, output.errors)),
            ),
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
        # `_listen` handles a dead guard.
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(order)

    def _listen(self, report: TextIO, pumps: Sequence[threading.Thread]) -> None:
        """Reads the guard's reports until it ends, then waits for the rest of the output; runs in a thread."""
        with report:
            for line in report:
                self._handle_report(*line.split())
        self.seconds = time.monotonic() - self._started
        # The guard was killed before it could report, and the process may still run.
        if self.status is None:
            self.destroy()
        self._guard.wait()
        for pump in pumps:
            pump.join(_OUTPUT_SECONDS)
        self._on_ended(self)

    def _handle_report(self, word: str, number: str = "") -> None:
        """Handles a report: `started <pid>`, `overdue` or `ended <status>`."""
        if word == "started":
            self._pid = int(number)
        elif word == "overdue":
            self._on_overdue(self)
        else:
            self.status = int(number)


def _forward_output(source: IO[bytes], output: Output, prefix: str, epochs: EpochLines | None) -> None:
    """Forwards lines until the last process that could write any has ended, but for epochs if `epochs` filters them."""
    lines = Lines()
    for data in iter(partial(os.read, source.fileno(), 1 << 16), b""):
        whole = lines.feed(data)
        output.write(prefix, epochs.filter(whole) if epochs else whole)
    whole = lines.close()
    output.write(prefix, epochs.filter(whole) if epochs else whole)
    source.close()


def _forward_errors(source: IO[bytes], output: Output, prefix: str, tracebacks: Tracebacks) -> None:
    """Forwards lines until the last process that could write any has ended, and tracebacks once they are whole."""
    lines = Lines()
    # Any number of files may be open, which `select.select` wouldn't take.
    ready = select.poll()
    ready.register(source, select.POLLIN)
    while True:
        if not ready.poll(tracebacks.pause):
            output.write_errors(prefix, tracebacks.release())
        elif data := os.read(source.fileno(), 1 << 16):
            output.write_errors(prefix, tracebacks.feed(lines.feed(data)))
        else:
            break
    output.write_errors(prefix, [*tracebacks.feed(lines.close()), *tracebacks.release()])
    source.close()
