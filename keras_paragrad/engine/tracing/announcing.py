"""Says what `fit` is busy with at its start, after five seconds."""

import contextlib
import inspect
import logging
import shutil
import sys
import threading
import time
from collections.abc import Generator
from typing import TextIO

from keras_paragrad.compat.model import fit_frame

# For how many seconds a start is silent, and after how many the line is written anew.
DELAY, INTERVAL = 5.0, 1.0

_log = logging.getLogger("keras_paragrad")
# Replicas are traced on separate threads, which announce nothing.
_thread = threading.local()


@contextlib.contextmanager
def announcing(phase: str, verbose: str | int | None = None) -> Generator[None]:
    """Context that shows in a line, or logs without a terminal, what `fit` is busy with.

    An inner phase replaces the outer one while it lasts. `verbose` is as in `fit`; by default, the running `fit`'s. 0
    is silent, and so is a call outside of `fit`.
    """
    line: _Line | None = getattr(_thread, "line", None)
    if line is not None:
        with line.within(phase):
            yield
    elif _verbosity(verbose) in (0, False):
        yield
    else:
        line = _thread.line = _Line(phase)
        try:
            yield
        finally:
            _thread.line = None
            line.end()


def announcing_part(phase: str) -> contextlib.AbstractContextManager[None]:
    """Context of a phase within `announcing`. Elsewhere, it does nothing."""
    line: _Line | None = getattr(_thread, "line", None)
    return line.within(phase) if line else contextlib.nullcontext()


def _verbosity(stated: str | int | None) -> str | int:
    if stated is not None:
        return stated
    running = fit_frame(inspect.currentframe())
    return running.f_locals.get("verbose", 1) if running else 0


class _Line:
    """A line that another thread writes while this one is busy."""

    def __init__(self, phase: str):
        self._phases = [phase]
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, name="keras_paragrad announcing", daemon=True)
        self._writer.start()

    @contextlib.contextmanager
    def within(self, phase: str) -> Generator[None]:
        """Context in which the line says another phase."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def end(self) -> None:
        """Clears the line, and ends its thread."""
        self._ended.set()
        self._writer.join()

    def _write(self) -> None:
        stream, logged, width = _terminal(), set[str](), 0
        if self._ended.wait(DELAY):
            return
        # A closed terminal is no error.
        with contextlib.suppress(OSError, ValueError):
            while not self._ended.is_set():
                phase = self._phases[-1]
                text = f"keras_paragrad: {phase} ({time.monotonic() - self._begin:.0f} s so far)"
                if stream:
                    # A line can't be overwritten once it wraps.
                    text = text[: shutil.get_terminal_size().columns - 1]
                    stream.write(f"\r{text:<{width}}")
                    stream.flush()
                    width = len(text)
                elif phase not in logged:
                    _log.info("%s", text.removeprefix("keras_paragrad: "))
                    logged.add(phase)
                self._ended.wait(INTERVAL)
            if stream and width:
                stream.write(f"\r{'':{width}}\r")
                stream.flush()


def _terminal() -> TextIO | None:
    """The stream on which a line can be overwritten; `None` in files and pipes."""
    if sys.stderr is not None and sys.stderr.isatty():
        return sys.stderr
    # Notebooks overwrite lines too. They show stderr in red, so the line goes to stdout, as Keras's progress bar does.
    return sys.stdout if type(sys.stdout).__module__ == "ipykernel.iostream" else None
