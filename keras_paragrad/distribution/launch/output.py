"""Prints the launcher's messages and its processes' output, a whole line at a time."""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

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
