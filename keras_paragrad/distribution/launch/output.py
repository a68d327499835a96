"""What the launcher prints: its own words and those of its processes, a whole line at a time."""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Output:
    """The launcher's standard output and standard error, on which lines never mix.

    Args:
        on_closed: Called when nobody reads the output any more.
    """

    def __init__(self, on_closed: Callable[[], None]):
        self._on_closed = on_closed
        self._turn = threading.Lock()
        self._own = self.prefix("launch", None, sys.stderr)

    def prefix(self, label: str, number: int | None, stream: TextIO) -> str:
        """What a line begins with, in the colour of its process's number where the stream shows colours."""
        console = Console(file=stream)
        colour = "bold" if number is None else _COLOURS[number % len(_COLOURS)]
        with console.capture() as written:
            console.print(Text(f"[{label}]", colour), end=" ")
        return written.get()

    def say(self, message: str) -> None:
        """Says something of the launcher's own, on standard error."""
        self.write(sys.stderr, self._own, [message])

    def write(self, stream: TextIO, prefix: str, lines: Iterable[str]) -> None:
        """Writes whole lines."""
        data = "".join(f"{prefix}{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        with self._turn:
            try:
                # Past Python's buffer, which would try once more at exit what has failed here.
                while data:
                    data = data[os.write(stream.fileno(), data) :]
            except BrokenPipeError:
                self._on_closed()
