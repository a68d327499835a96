"""What a command that takes seconds shows meanwhile: what it does, and none of TensorFlow's log lines."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from keras_paragrad.cli import PROGRAM, STARTED_AS_COMMAND, log_filter

# Says on standard error what is done from now on, if it takes time.
Say = Callable[[str], None]

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Seconds after which what is still done is said again.
_REPEATED = 10.0


def while_waiting(command: str, work: Callable[[Say], int], needs_tensorflow: bool = True) -> int:
    """Runs the work of a command, which says what takes time; returns its exit status.

    TensorFlow's log lines are shown only if it fails, or if `TF_CPP_MIN_LOG_LEVEL` is set.
    """
    filters = STARTED_AS_COMMAND and _LEVEL not in os.environ
    with _without_log_lines() if filters else contextlib.nullcontext() as log, _progress(f"{PROGRAM} {command}") as say:
        if needs_tensorflow and "tensorflow" not in sys.modules:
            say("loading TensorFlow")
        status = 1
        try:
            status = work(say)
        finally:
            # Wrong arguments, 2, have nothing to do with it.
            if status == 1 and log is not None:
                log.show()
        return status


class _HeldLog:
    """TensorFlow's log lines, which were held back."""

    def show(self) -> None:
        """Prints them."""
        sys.stderr.flush()
        os.write(2, log_filter.FAILED)


@contextlib.contextmanager
def _without_log_lines() -> Generator[_HeldLog]:
    """Filters what is written to standard error, by C++ too."""
    sys.stderr.flush()
    command = [sys.executable, "-I", "-S", str(Path(log_filter.__file__))]
    # Ctrl-C leaves a session of its own alone, so that it passes on what the command says to it.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert child.stdin is not None
    before = os.dup(2)
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()

    try:
        yield _HeldLog()
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        # A process that was started meanwhile may keep the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)


@contextlib.contextmanager
def _progress(prefix: str) -> Generator[Say]:
    """Prints what is said at once, and again with the seconds it has taken, until it ends."""
    stages, ended = [("", time.monotonic())], threading.Event()

    def say(what: str) -> None:
        stages.append((what, time.monotonic()))
        print(f"{prefix}: {what}...", file=sys.stderr, flush=True)

    def repeat() -> None:
        while not ended.wait(1.0):
            what, since = stages[-1]
            seconds = time.monotonic() - since
            if what and seconds >= _REPEATED * (repeated.get(since, 0) + 1):
                repeated[since] = int(seconds // _REPEATED)
                print(f"{prefix}: {what}... {seconds:.0f} s", file=sys.stderr, flush=True)

    # How often each stage was said again, by when it began.
    repeated: dict[float, int] = {}
    threading.Thread(target=repeat, name="progress", daemon=True).start()
    try:
        yield say
    finally:
        ended.set()
