"""Tests in processes of their own, forked from one that has imported TensorFlow and done nothing with it yet."""

import multiprocessing
import os
import tempfile
from pathlib import Path

_MARK = "KERAS_PARAGRAD_TEST_IN_OWN_PROCESS"

# Importing takes seconds, and starts none of the threads that could not be forked.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["keras", "pytest"])


def is_this_one() -> bool:
    """Returns whether this process runs one test alone."""
    return _MARK in os.environ


def run_pytest(arguments: list[str], seconds: float) -> None:
    """Runs pytest in a process of its own.

    Args:
        arguments: Pytest's.
        seconds: After which the process is killed.

    Raises:
        AssertionError: It failed or took longer; with what it printed.
    """
    with tempfile.NamedTemporaryFile() as output:
        environment = {**os.environ, _MARK: "1"}
        process = _context.Process(target=_run_pytest, args=(arguments, environment, output.name))
        process.start()
        process.join(seconds)
        in_time = process.exitcode is not None
        process.kill()
        process.join()
        printed = Path(output.name).read_text(errors="replace")[-6000:]
    assert in_time, f"not done after {seconds} seconds in a process of its own:\n{printed}"
    assert process.exitcode == 0, f"ended by {process.exitcode} in a process of its own:\n{printed}"


def _run_pytest(arguments: list[str], environment: dict[str, str], output: str) -> None:
    with Path(output).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)

    import pytest

    raise SystemExit(pytest.main(arguments))
