"""Times ways to the same gradients by turns, for the scripts beside it, which run in environments of their own."""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from harness import interleaved

# Long enough that what is timed is not the clock, and that both cores are awake.
SECONDS = 0.03


def in_plain(cases: dict[str, Callable[[], float]], rounds: int) -> tuple[float, dict[str, float]]:
    """What the first case returns, and how many times that the others do.

    Ratios are taken within each turn, and the median of those, so that a machine busy for a while slows both sides.

    Args:
        cases: As `interleaved` takes them; the first is the plain one.
        rounds: How many turns count; two before that do not.
    """
    turns = [interleaved(cases, rounds=1, warm_up=0) for _ in range(2 + rounds)][2:]
    plain, *others = cases
    ratios = {way: statistics.median(turn[way] / turn[plain] for turn in turns) for way in others}
    return statistics.median(turn[plain] for turn in turns), ratios


def print_ratios(model: str, jit: str, ways: dict[str, Callable[[], Any]], rounds: int = 15) -> None:
    """Prints a JSON line for each way, with how many times the time of the first it takes.

    Args:
        model: What is differentiated.
        jit: Whether it is compiled, `"on"` or `"off"`.
        ways: By name, functions that return when they are done; the first is the plain batch gradient.
        rounds: How many turns count.
    """
    _, ratios = in_plain({way: _timed(function) for way, function in ways.items()}, rounds)
    for way, ratio in ratios.items():
        print(json.dumps({"way": way, "model": model, "jit": jit, "ratio": ratio}), flush=True)


def _timed(function: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS:
            function()
            calls += 1
        return (time.perf_counter() - start) / calls * 1e3

    return run
