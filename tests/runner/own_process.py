"""Tests in processes of their own, forked from one that has imported TensorFlow and done nothing with it yet."""

import gc
import importlib
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from runner import graphs

_MARK = "KERAS_PARAGRAD_TEST_IN_OWN_PROCESS"

# Importing takes seconds, and starts none of the threads that could not be forked.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["keras", "keras_paragrad", "hypothesis", "pytest"])


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
        # Loading the installed plugins, which rewrites the assertions of Hypothesis, takes longer than most tests.
        environment = {**os.environ, _MARK: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        # They are recorded where the tests are chosen.
        environment.pop("DURATIONS", None)
        process = _context.Process(target=_run_pytest, args=(arguments, environment, output.name))
        process.start()
        process.join(seconds)
        in_time = process.exitcode is not None
        process.kill()
        process.join()
        printed = Path(output.name).read_text(errors="replace")[-6000:]
    assert in_time, f"not done after {seconds} seconds in a process of its own:\n{printed}"
    assert process.exitcode == 0, f"ended by {process.exitcode} in a process of its own:\n{printed}"


def call(
    function: Callable[..., Any], argument: Any, environments: Sequence[dict[str, str]], seconds: float
) -> list[Any]:
    """Calls a function in several processes at once.

    Args:
        function: An importable function.
        argument: What it gets.
        environments: What is to be in the environment of each process.
        seconds: After which they are killed.

    Returns:
        What it returned in each.

    Raises:
        RuntimeError: It failed in one of them, or took longer.
    """
    ends, processes = [], []
    try:
        for environment in environments:
            ours, theirs = _context.Pipe(duplex=False)
            ends.append(ours)
            process = _context.Process(target=_call, args=(function, argument, dict(environment), theirs))
            process.start()
            processes.append(process)
            theirs.close()
        return _received(ends, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            # The server that forked it doesn't always say that it ended.
            process.join(30)


def collect_rarely() -> None:
    """Has no collection of garbage go through what is imported by now, and most of what is traced through none."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def imported_with(module: str) -> list[str]:
    """Imports a module in a process of its own, and returns the names of all that are imported then."""
    (names,) = call(_imported_with, module, [{}], seconds=120)
    return names


def start(function: Callable[..., Any], argument: Any, environment: dict[str, str], output: Path) -> Any:
    """Starts a function in a process of its own, which ends as a program would.

    Args:
        function: An importable function.
        argument: What it gets.
        environment: What is to be in the process's environment.
        output: The file that it prints to.

    Returns:
        The process, which the caller has to end.
    """
    process = _context.Process(target=_run, args=(function, argument, dict(environment), str(output)))
    process.start()
    return process


def on_workers(function: Callable[..., Any], argument: Any, seconds: float, workers: int = 2) -> list[Any]:
    """Calls a function in the processes of a cluster of workers on this machine; see `call`."""
    return call(function, argument, environments_of_workers(workers), seconds)


def environments_of_workers(workers: int = 2) -> list[dict[str, str]]:
    """What is in the environment of each process of a cluster of workers on this machine."""
    hosts = [f"127.0.0.1:{next(_free_ports)}" for _ in range(workers)]
    tasks = [{"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}} for index in range(workers)]
    return [{"TF_CONFIG": json.dumps(task)} for task in tasks]


def _ports() -> Iterator[int]:
    """Free ports: below those that the kernel gives to connections, and other ones in each of pytest's processes."""
    first = 10_000 + os.getpid() * 1009 % 20_000
    for port in itertools.cycle(range(first, first + 2000)):
        try:
            with socket.socket() as free:
                free.bind(("127.0.0.1", port))
        except OSError:
            continue
        yield port


_free_ports = _ports()


def _imported_with(module: str) -> list[str]:
    importlib.import_module(module)
    return list(sys.modules)


def _received(ends: Sequence[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for end in ends if id(end) not in results]
        ready = wait(waiting, max(deadline - time.monotonic(), 0))
        if not ready:
            raise RuntimeError("not done in time in a process of its own")
        for end in ready:
            succeeded, results[id(end)] = _word_of(end)
            if not succeeded:
                raise RuntimeError(results[id(end)])
    return [results[id(end)] for end in ends]


def _word_of(end: Any) -> tuple[bool, Any]:
    try:
        return end.recv()
    except EOFError:
        return False, "a process of its own ended without a word"


def _call(function: Callable[..., Any], argument: Any, environment: dict[str, str], end: Any) -> None:
    _print_to(os.devnull)
    os.environ.update(environment)
    graphs.leave_unoptimized()
    collect_rarely()
    try:
        result = True, function(argument)
    except Exception as error:
        result = False, f"{type(error).__name__}: {error}"
    end.send(result)


def _run(function: Callable[..., Any], argument: Any, environment: dict[str, str], output: str) -> None:
    _print_to(output)
    os.environ.update(environment)
    graphs.leave_unoptimized()
    collect_rarely()
    function(argument)


def _print_to(path: str) -> None:
    with Path(path).open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _run_pytest(arguments: list[str], environment: dict[str, str], output: str) -> None:
    _print_to(output)
    os.environ.update(environment)

    import pytest

    # Pytest collects garbage several times as it ends.
    collect_rarely()
    raise SystemExit(pytest.main(arguments))
