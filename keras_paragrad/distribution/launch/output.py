"""Prints the launcher's messages and its processes' output, a whole line at a time."""

import codecs
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

# How a progress bar returns to the start of its line.
_BACK = re.compile("[\b]*\r")
# Lines are cut at this many characters, so that a stream without line ends can't exhaust memory.
_LONGEST = 1 << 20


class Lines:
    """Splits a process's output into lines that read well in a log.

    A line that is redrawn from its start gives one line, in its final state. Until then, its current state is given at
    intervals.

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
        self._shown = clock()
        # Bytes that are not UTF-8 pass through unchanged.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Adds output."""
        *ended, rest = (self._rest + self._decoder.decode(data)).split("\n")
        lines = [*map(_last_sight, ended), *self._unfinished(rest)]
        if lines:
            self._shown = self._clock()
        return lines

    def close(self) -> list[str]:
        """The last line if it has no line end."""
        last = _last_sight(self._rest + self._decoder.decode(b"", final=True))
        self._rest = ""
        return [last] if last else []

    def _unfinished(self, rest: str) -> list[str]:
        """Buffers an incomplete line, and returns it if it is too long or a snapshot is due."""
        *before, last = _BACK.split(rest)
        sights = [sight for sight in before if sight.strip()]
        redrawn = bool(sights) and bool(last.strip("\b"))
        # Until something is drawn over it, the last sight stands: the line may end here.
        self._rest = last if redrawn or not sights else f"{sights[-1]}\r{last}"
        if len(self._rest) > _LONGEST:
            too_long, self._rest = self._rest, ""
            return [_last_sight(too_long)]
        due = self._clock() - self._shown >= self._interval
        return [_rubbed_out(sights[-1])] if redrawn and due else []


def _last_sight(line: str) -> str:
    """The final state of a line in a terminal."""
    sights = [sight for sight in _BACK.split(line) if sight.strip()]
    return _rubbed_out(sights[-1]) if sights else ""


def _rubbed_out(sight: str) -> str:
    """Applies backspaces, and drops what was shown before the end of the line was erased."""
    kept = []
    for character in sight.rstrip("\b"):
        if character == "\b":
            del kept[-1:]
        else:
            kept.append(character)
    return "".join(kept)


_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Output:
    """The launcher's standard output and standard error, with lines never interleaved.

    Args:
        on_closed: Called when the reader has closed the output.
    """

    def __init__(self, on_closed: Callable[[], None]):
        self._on_closed = on_closed
        self._turn = threading.Lock()
        self._own = self.prefix("launch", None, sys.stderr)

    def prefix(self, label: str, number: int | None, stream: TextIO) -> str:
        """The prefix of a process's lines, in the colour of its index if the stream supports colours."""
        console = Console(file=stream)
        colour = "bold" if number is None else _COLOURS[number % len(_COLOURS)]
        with console.capture() as written:
            console.print(Text(f"[{label}]", colour), end=" ")
        return written.get()

    def say(self, message: str) -> None:
        """Prints a message of the launcher to standard error."""
        self.write(sys.stderr, self._own, [message])

    def write(self, stream: TextIO, prefix: str, lines: Iterable[str]) -> None:
        """Writes whole lines."""
        data = "".join(f"{prefix}{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        with self._turn:
            try:
                # Bypass Python's buffer, which would retry a failed write at exit.
                while data:
                    data = data[os.write(stream.fileno(), data) :]
            except BrokenPipeError:
                self._on_closed()
