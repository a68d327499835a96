"""The report's view of a trace window."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_paragrad.profiling.report.bars import Segment, StepChart, shares_bar, step_chart
from keras_paragrad.profiling.report.figures import PARTS, StepFigures, figures_of
from keras_paragrad.profiling.report.runs import ProfiledWindow
from keras_paragrad.profiling.report.stages_view import StagesChart, stages_chart
from keras_paragrad.profiling.report.units import count, milliseconds, share, size
from keras_paragrad.profiling.summary import ProfileSummary

MOST_DETAILED = 4
MOST_OPERATIONS = 15
# Compiler-generated names can be arbitrarily long.
LONGEST_NAME = 160


@dataclass(frozen=True)
class OperationRow:
    """A formatted row of the table of operations.

    Attributes:
        name: Its name, shortened if it is very long.
        kind: Its type.
        layer: Its layer, or `""`.
        count: Number of executions in the window.
        took: Its self time per step; the window's total if that has no steps.
        share: Its self time as a share of all operations'.
        percent: The share as a number, for its bar.
    """

    name: str
    kind: str
    layer: str
    count: str
    took: str
    share: str
    percent: float


@dataclass(frozen=True)
class WindowView:
    """A window in detail.

    Attributes:
        name: Its folder.
        summary: Its summary.
        figures: The statistics of its steps, or `None` without steps.
        chart: Its steps, or `None` without any.
        shares: The shares of its time as a bar.
        operations: The operations that took longest.
        memory: Peak memory, by device.
        stages: The stages of a pipeline, or `None` without one.
    """

    name: str
    summary: ProfileSummary
    figures: StepFigures | None
    chart: StepChart | None
    shares: tuple[Segment, ...]
    operations: tuple[OperationRow, ...]
    memory: tuple[tuple[str, str], ...]
    stages: StagesChart | None


def window_view(window: ProfiledWindow, longest: float = 0.0) -> WindowView:
    """A window in detail.

    Args:
        window: The trace window.
        longest: The least upper end of the time axis, in milliseconds, for comparison with another window.
    """
    summary = window.summary
    figures = figures_of(summary.steps)
    chart = step_chart(summary.steps, figures, max(longest, figures.longest)) if figures else None
    memory = tuple((device, size(peak)) for device, peak in summary.peak_memory.items())
    operations = tuple(
        OperationRow(
            shortened(operation.name),
            operation.kind,
            operation.layer,
            count(operation.count),
            milliseconds(summary.per_step(operation)),
            share(operation.share),
            round(100 * operation.share, 1),
        )
        for operation in summary.operations[:MOST_OPERATIONS]
    )
    shares = shares_bar(figures) if figures else ()
    stages = stages_chart(summary.pipeline) if summary.pipeline else None
    return WindowView(window.name, summary, figures, chart, shares, operations, memory, stages)


def overview(windows: Sequence[ProfiledWindow]) -> tuple[tuple[str, ...], ...]:
    """A row for every window: its name, steps, median, 95th percentile and shares."""
    return tuple(_row(window) for window in windows)


def shortened(name: str) -> str:
    """A name with its middle elided if it is very long."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _row(window: ProfiledWindow) -> tuple[str, ...]:
    figures = figures_of(window.summary.steps)
    if figures is None:
        return (window.name, "0", *["n/a"] * (2 + len(PARTS)))
    shares = (share(figures.shares[part]) for part in PARTS)
    return (window.name, count(figures.count), milliseconds(figures.median), milliseconds(figures.p95), *shares)
