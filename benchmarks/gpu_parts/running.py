"""Runs modules of cases in processes of their own, with time limits, and passes on each line once it is known."""

import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_parts.case import CRASHED, EMPTY, NOT_RUN, RAISED, REFUSED, TIMED_OUT, Case, Line, Machine

# As many times its limit a case may take on CPUs, which other programs use too.
ON_CPUS = 5
# A process that has not imported TensorFlow and seen its devices by then is ended.
START_SECONDS = 120
NO_TIME = "No time was left. Give more by --seconds, or all of it to this part by --only."
PRELOADED = ["keras", "keras_paragrad"]


@dataclass(frozen=True)
class Part:
    """Modules of cases.

    Attributes:
        shows: What it shows, in a few words.
        modules: Their names, as they are imported. Each has its `cases`, and may set `ALONE`, for a process for each
            case; `DEVICES`, the number of devices it wants; `REFUSES`, if the package may refuse what is asked; and
            `TENSORFLOW = False`, if it must not take the GPU's memory.
        share: Of the time of the whole run; what a part leaves goes to those after it.
        parallel: Whether its modules may run at the same time, as nothing is timed or measured.
    """

    shows: str
    modules: tuple[str, ...]
    share: float
    parallel: bool = False


class Runner:
    """Runs parts.

    Args:
        cpu: Whether to run the small form on CPUs.
        every: Whether to run all cases as they are on a GPU, or the small form.
        show: Gets the part, the name and the `Line` of each case, from several threads.
        meet: Gets what there is to be known of the machine, from each process that knows.
        deadline: When all has to have ended, in the seconds of `time.monotonic`.
        processes: How many run at once, at most, where nothing is timed; on CPUs times mean nothing anyway.
    """

    def __init__(
        self,
        cpu: bool,
        every: bool,
        show: Callable[[str, str, Line], None],
        meet: Callable[[dict[str, Any]], None],
        deadline: float,
        processes: int,
    ):
        self._cpu, self._every, self._show, self._meet = cpu, every, show, meet
        self._deadline, self._processes = deadline, processes
        # A fork of a process that has called CUDA can't use it; without a GPU, forks save the seconds of imports.
        self._context: Any = multiprocessing.get_context("forkserver" if cpu else "spawn")
        if cpu:
            self._context.set_forkserver_preload(PRELOADED)

    def run(self, parts: dict[str, Part]) -> None:
        """Runs the modules of parts, one part after another; on CPUs as many at once as there may be.

        Args:
            parts: By name, the parts. When the share of one and those before it is over, no further case of it begins.
        """
        began, shares, used = time.monotonic(), sum(part.share for part in parts.values()), 0.0
        waiting: list[list[tuple[str, str, float]]] = []
        for name, part in parts.items():
            used += part.share / shares
            until = began + used * (self._deadline - began)
            modules = [(name, module, until) for module in part.modules]
            waiting += [modules] if part.parallel else [[module] for module in modules]
        if self._cpu:
            waiting = [[module for modules in waiting for module in modules]]
        for together in waiting:
            with ThreadPoolExecutor(self._processes) as threads:
                for ran in [threads.submit(self._run_module, *module) for module in together]:
                    ran.result()

    def _run_module(self, part: str, module: str, until: float) -> None:
        done: int | None = 0
        while done is not None:
            if time.monotonic() >= self._deadline:
                self._show(part, f"{module}, from case {done + 1}", Line(NO_TIME, NOT_RUN))
                return
            done = self._run_process(part, module, done, until)

    def _run_process(self, part: str, module: str, first: int, until: float) -> int | None:
        """Runs cases in one process, and returns which comes next, or `None` after the last."""
        ours, theirs = self._context.Pipe(duplex=False)
        # Not a daemon: what tests a collective or launches workers has children.
        arguments = (module, first, self._cpu, self._every, until, theirs)
        process = self._context.Process(target=run_cases, args=arguments)
        process.start()
        theirs.close()
        try:
            return self._follow(part, module, first, ours)
        finally:
            process.kill()
            process.join()

    def _follow(self, part: str, module: str, at: int, received: Connection) -> int | None:
        cases: list[tuple[str, float]] | None = None
        began, limit = time.monotonic(), float(START_SECONDS)
        while True:
            name = module if cases is None else cases[at][0]
            left = min(began + limit, self._deadline) - time.monotonic()
            try:
                word = received.recv() if received.poll(max(left, 0)) else None
            except EOFError:
                word = ("line", Line("The process ended without a word.", CRASHED))
            if word is None:
                whose = "the whole run's time is over" if time.monotonic() >= self._deadline else f"{limit:g} s"
                word = ("line", Line(f"Ended at its time limit: {whose}.", TIMED_OUT))
            if word[0] == "machine":
                self._meet(word[1])
            elif word[0] == "cases":
                cases = [(each, limit * (ON_CPUS if self._cpu else 1)) for each, limit in word[1]]
            elif word[0] == "line":
                self._show(part, name, replace(word[1], seconds=round(time.monotonic() - began, 1)))
                if cases is None or at + 1 == len(cases):
                    return None
                at += 1
                if word[1].outcome in (CRASHED, TIMED_OUT):
                    return at
            elif word[0] == "next process":
                return at
            if cases is not None:
                began, limit = time.monotonic(), cases[at][1]


def run_cases(module: str, first: int, cpu: bool, every: bool, until: float, to: Connection) -> None:
    """Runs in a process of its own: sends the machine, the cases, and a line for each from the first on."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = importlib.import_module(module)
        machine = Machine(cpu)
        if getattr(found, "TENSORFLOW", True):
            from gpu_parts import devices_of

            machine = replace(devices_of.make(cpu, getattr(found, "DEVICES", 1)), eager=cpu and not every)
            to.send(("machine", devices_of.described()))
        cases: Sequence[Case] = [case for case in found.cases if every or case.small]
    except Exception as error:
        to.send(("line", Line(in_words(error), RAISED)))
        return
    to.send(("cases", [(each.name, each.seconds) for each in cases]))
    for number, case in enumerate(cases[first:]):
        if number and getattr(found, "ALONE", False) and time.monotonic() <= until:
            to.send(("next process",))
            return
        to.send(("line", line_of(case, machine, until, not cpu and getattr(found, "REFUSES", False))))


def _end_with_parent() -> None:
    """Ends this process when the one that started it has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def line_of(case: Case, machine: Machine, until: float, may_be_refused: bool = False) -> Line:
    """Runs a case, whatever becomes of it."""
    if time.monotonic() > until:
        return Line(NO_TIME, NOT_RUN)
    try:
        line = case.run(machine, **case.arguments)
    except ImportError as error:
        return Line(str(error), NOT_RUN)
    except Exception as error:
        return Line(in_words(error), REFUSED if may_be_refused and is_refusal(error) else RAISED)
    return line if isinstance(line, Line) else Line(f"It returned {line!r}, not a Line.", EMPTY)


def in_words(error: BaseException) -> str:
    """An error's type, what it says, and the line of ours that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    says = " ".join(str(error).split())
    if len(says) > 600:
        # TensorFlow says first where the operation was made, and last what is wrong.
        says = f"{says[:150]} ... {says[-450:]}"
    return f"{type(error).__name__}: {says} ({Path(frame.filename).name}:{frame.lineno})"


def is_refusal(error: Exception) -> bool:
    """Whether the package says that it can't do something, rather than something having failed."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(sys.modules["keras_paragrad"].__file__ or "").parent
    return isinstance(error, (ValueError, RuntimeError)) and package in raised.parents
