"""Prints the summary of a trace window, which is a range of traced batches, to a terminal."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.plain_text import Printable, show
from keras_paragrad.profiling.summary import VARIANT, ProfileSummary, StepTime, shares_of

WIDTH = 100
PARTS = {
    "input": "waiting for input",
    "host": "on the host, between operations",
    "compile": "compiling functions",
    "compute": "computing",
    "collective": "with other replicas",
    "idle": "idle (untraced Python)",
}
_BAR, _MOST_OPERATIONS = 24, 5


class WindowFigures(Printable):
    """A window's summary with its longest operations, for `print` and for a rich console."""

    width = WIDTH

    def __init__(self, summary: ProfileSummary, log_dir: str | Path):
        self.summary = summary
        self.command = f"tensorboard --logdir {shlex.quote(str(log_dir))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self.summary
        yield Text(_headline(summary), "bold")
        if summary.steps:
            yield _parts_table(summary.steps)
        if summary.operations:
            yield _operations_table(summary)
        if summary.pipeline:
            times = summary.pipeline
            yield Text(
                f"Stages wait {times.bubble:.0%} of the time; {times.stages} of equal time would wait {times.ideal:.0%}"
            )
        peaks = {
            name: "n/a" if peak is None else f"{peak / 2**20:,.0f} MiB" for name, peak in summary.peak_memory.items()
        }
        yield Text(f"Peak memory: {', '.join(f'{name} {peak}' for name, peak in peaks.items()) or 'n/a'}")
        if summary.advice:
            yield Text(f"{summary.advice.evidence}: {summary.advice.text}", "bold")
        for note in summary.notes:
            yield Text(note, "dim")
        yield Text(f"To open in TensorBoard: {self.command}", overflow="fold")


def print_figures(figures: WindowFigures) -> None:
    """Prints figures in the terminal's width and colours, or as plain text to a file."""
    # Ends the line of Keras's progress bar.
    print()
    show(figures)


def _headline(summary: ProfileSummary) -> str:
    """How long steps took, in a line."""
    if not summary.steps:
        return "Profile without steps"
    durations = [step.duration for step in summary.steps]
    median, high = np.percentile(durations, [50, 95])
    first, last = summary.steps[0].step, summary.steps[-1].step
    return f"Profile of batches {first} to {last}: {median:.2f} ms per batch (median), {high:.2f} ms (p95)"


def _parts_table(steps: Sequence[StepTime]) -> Table:
    shares = shares_of(steps)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    for name, words in PARTS.items():
        # Most windows compile nothing.
        if name != "compile" or shares[name]:
            table.add_row(f"{shares[name]:.1%}", "█" * round(shares[name] * _BAR), words)
    return table


def _operations_table(summary: ProfileSummary) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("Operation", "Layer"):
        table.add_column(header, overflow="fold")
    for header in ("Count", "ms per step" if summary.steps else "ms", ""):
        table.add_column(header, justify="right")
    for operation in summary.operations[:_MOST_OPERATIONS]:
        table.add_row(
            VARIANT.sub("", operation.kind),
            operation.layer or "-",
            str(operation.count),
            f"{summary.per_step(operation):.2f}",
            f"{operation.share:.0%}",
        )
    return table
