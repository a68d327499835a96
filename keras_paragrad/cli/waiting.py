"""Shows the progress of a command that takes seconds, and hides TensorFlow's log lines."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from keras_paragrad.cli import PROGRAM, STARTED_AS_COMMAND, log_filter

# Announces the next stage of a command on standard error.
Say = Callable[[str], None]

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Seconds between repeated announcements of the same stage.
_REPEATED = 10.0


def while_waiting(command: str, work: Callable[[Say], int], needs_tensorflow: bool = True) -> int:
    """Runs the work of a command, which announces its slow stages; returns its exit status.

    TensorFlow's log lines are shown only if it fails, or if `TF_CPP_MIN_LOG_LEVEL` is set.
    """
    filters = STARTED_AS_COMMAND and _LEVEL not in os.environ
    filtered = _without_log_lines() if filters else contextlib.nullcontext()
    with filtered as show_log, _progress(f"{PROGRAM} {command}") as say:
        if needs_tensorflow and "tensorflow" not in sys.modules:
            say("loading TensorFlow")
        # Also after an exception.
        status = 1
        try:
            status = work(say)
        finally:
            # After wrong arguments (2), log lines don't help.
            if status == 1 and show_log is not None:
                show_log()
        return status


def _show_held() -> None:
    """Has the filter print the log lines that it holds back."""
    sys.stderr.flush()
    os.write(2, log_filter.FAILED)


@contextlib.contextmanager
def _without_log_lines() -> Generator[Callable[[], None]]:
    """Filters everything written to standard error, also by C++; yields a function that shows what is held back."""
    sys.stderr.flush()
    command = [sys.executable, "-I", "-S", str(Path(log_filter.__file__))]
    # Ctrl-C doesn't reach a separate session, so the filter can still pass on the command's last output.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert child.stdin is not None
    before = os.dup(2)
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()

    try:
        yield _show_held
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        # A child process may keep the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(2)


@contextlib.contextmanager
def _progress(prefix: str) -> Generator[Say]:
    """Context whose `say` prints a stage of the command at once, and again with its duration until it ends."""
    stages, ended = [("", time.monotonic())], threading.Event()

    def say(stage: str) -> None:
        stages.append((stage, time.monotonic()))
        print(f"{prefix}: {stage}...", file=sys.stderr, flush=True)

    def repeat() -> None:
        while not ended.wait(_REPEATED):
            stage, since = stages[-1]
            if stage and (seconds := time.monotonic() - since) >= _REPEATED:
                print(f"{prefix}: {stage}... {seconds:.0f} s", file=sys.stderr, flush=True)

    threading.Thread(target=repeat, name="progress", daemon=True).start()
    try:
        yield say
    finally:
        ended.set()
