"""What every benchmark shares: interleaved timing, Fashion-MNIST, a table and a JSON file."""

import functools
import gzip
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

# TensorFlow uses oneDNN unasked on some processors only, and without it convolutions take several times as long. So
# that the ratios of machines compare, it is on everywhere.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

RESULTS = Path(__file__).with_name("results")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def interleaved(cases: dict[str, Callable[[], float]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Runs cases by turns, and returns the median time of each.

    Args:
        cases: By name, a function that does one run and returns its time, in milliseconds per unit of work.
        rounds: How many turns of each case count.
        warm_up: How many turns run before, as they may compile, and don't count.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + rounds):
        for name, run in cases.items():
            took = run()
            if turn >= warm_up:
                times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}


def timed_fit(model, dataset, steps: int, micro_batches: int, callbacks: Sequence = ()) -> Callable[[], float]:
    """A case for `interleaved`: milliseconds per micro-batch in `model.fit`, whose `steps` have so many of them."""

    def run() -> float:
        start = time.perf_counter()
        model.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks))
        return (time.perf_counter() - start) / micro_batches * 1e3

    return run


def step_times(trained: dict[str, tuple], rounds: int, steps: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    """The median wall time and processor time of each case's steps, in milliseconds, with the cases taking turns.

    Args:
        trained: By name, a compiled model and the arrays of a batch.
        rounds: How many turns of each case count.
        steps: How many steps a turn has.
    """
    from models import endless

    # Processor time of all cores says more than wall time on a machine that others use too.
    processor_times: dict[str, list[float]] = {case: [] for case in trained}

    def turn(case: str) -> float:
        model, *data = trained[case]
        start, processor_start = time.perf_counter(), time.process_time()
        # At its end, `fit` of arrays would wait for the thread that tunes their pipeline, which sleeps.
        model.fit(endless(*data), steps_per_epoch=steps, verbose=0)
        processor_times[case].append((time.process_time() - processor_start) / steps * 1e3)
        return (time.perf_counter() - start) / steps * 1e3

    wall_times = interleaved({case: functools.partial(turn, case) for case in trained}, rounds, warm_up=1)
    return wall_times, {case: statistics.median(taken[1:]) for case, taken in processor_times.items()}


def report_step_times(
    name: str,
    title: str,
    make: Callable[[str, bool], tuple],
    cases: Sequence[str],
    base: str | Sequence[str],
    base_name: str,
    rounds: int,
    steps: int = 1,
) -> None:
    """Reports the wall time and processor time of steps, in milliseconds, without and with XLA.

    Args:
        name: The benchmark's file.
        title: What is trained, for the table's title.
        make: Returns the model of a case, compiled with XLA or not, and the arrays of a batch.
        cases: The cases, which take turns.
        base: The case that others are compared to, or several, whose sum they are compared to.
        base_name: How the column headers name it.
        rounds: How many turns of each case count.
        steps: How many steps a turn has.
    """
    columns = ["", "step", f"to {base_name}", "CPU time", f"to {base_name}, CPU time"]
    for jit_compile in ("off", "on"):
        taken = step_times({case: make(case, jit_compile == "on") for case in cases}, rounds, steps)
        bases = [base] if isinstance(base, str) else base
        # Wall time, then processor time.
        base_times = [sum(times[case] for case in bases) for times in taken]
        rows = [
            [
                case,
                *(
                    cell
                    for times, base_time in zip(taken, base_times, strict=True)
                    for cell in (round(times[case]), times[case] / base_time)
                ),
            ]
            for case in cases
        ]
        report(name, f"Milliseconds a step, jit {jit_compile}: {title}", columns, rows)


def peak_memory(script: str, *arguments: str) -> float:
    """Peak memory in MB of a separate process of a script, which calls `run_benchmark`, with these arguments."""
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow before.
    command = [sys.executable, "-W", "ignore", script, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    return float(finished.stdout.split()[-1])


def run_benchmark(train: Callable[..., object], *reports: Callable[[], None]) -> None:
    """Makes the reports; or, run by `peak_memory`, passes its arguments to `train` and prints peak memory in MB."""
    if not sys.argv[1:]:
        for each in reports:
            each()
        return
    train(*sys.argv[1:])
    # macOS counts bytes, and Linux KiB.
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def fashion_mnist(rows: int, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """The first `rows` images of a part of Fashion-MNIST, `"train"` or `"t10k"`, in [0, 1], and their classes."""
    if not FASHION_MNIST.exists():
        raise SystemExit("The benchmarks train on Fashion-MNIST. Install it: apt-get install dataset-fashion-mnist")
    with gzip.open(FASHION_MNIST / f"{part}-images-idx3-ubyte.gz") as images:
        pixels = np.frombuffer(images.read(16 + rows * 784), np.uint8, offset=16).reshape(rows, 28, 28, 1)
    with gzip.open(FASHION_MNIST / f"{part}-labels-idx1-ubyte.gz") as labels:
        classes = np.frombuffer(labels.read(8 + rows), np.uint8, offset=8)
    return pixels.astype("float32") / 255, classes.astype("int64")


def report(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table, and adds it to `results/<name>.json`.

    Args:
        name: The benchmark's file.
        title: What the table shows, with its units.
        columns: The head of each column.
        rows: The cells; numbers are rounded for the terminal alone.
    """
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=140).print(table)
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    saved = json.loads(path.read_text()) if path.exists() else {}
    saved[title] = [dict(zip(columns, row, strict=True)) for row in rows]
    path.write_text(json.dumps(saved, indent=1) + "\n")
