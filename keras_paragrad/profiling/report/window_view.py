"""The report's view of a trace window, with a chart of the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.formatting import Axis, axis_for, count, milliseconds, share, size
from keras_paragrad.profiling.report.lanes import Box, Lane, LanesChart
from keras_paragrad.profiling.report.layer_times import kind_rows, layers_chart
from keras_paragrad.profiling.report.lines import MOST_LINES, LineChart, line_chart
from keras_paragrad.profiling.report.runs import ProfiledWindow, Series
from keras_paragrad.profiling.report.step_chart import (
    Segment,
    StepChart,
    StepFigures,
    figures_of,
    shares_bar,
    step_chart,
)
from keras_paragrad.profiling.summary import PARTS, VARIANT, PipelineTime, ProfileSummary, StageWork

MOST_DETAILED = 3
MOST_OPERATIONS = 15
# Compiler-generated names can be arbitrarily long.
_LONGEST_NAME = 500
# In percent of the chart: narrower boxes have no room for a number.
_LEAST_NUMBERED = 1.6


@dataclass(frozen=True)
class OperationRow:
    """A formatted row of the table of operations; `percent` is its share as a number, for its bar."""

    name: str
    kind: str
    layer: str
    count: str
    self_time: str
    share: str
    percent: float


@dataclass(frozen=True)
class WindowView:
    """A window in detail; without steps, it has no figures and no chart."""

    name: str
    summary: ProfileSummary
    figures: StepFigures | None
    chart: StepChart | None
    shares: tuple[Segment, ...]
    operations: tuple[OperationRow, ...]
    memory: tuple[tuple[str, str], ...]
    stages: LanesChart | None
    layers: LanesChart | None
    kinds: tuple[tuple[tuple[str, ...], float], ...]
    memory_chart: LineChart | None
    communication: str


def window_view(window: ProfiledWindow) -> WindowView:
    """A window in detail."""
    summary = window.summary
    figures = figures_of(summary.steps)
    operations = tuple(
        OperationRow(
            shorten(operation.name),
            VARIANT.sub("", operation.kind),
            operation.layer,
            count(operation.count),
            milliseconds(summary.per_step(operation)),
            share(operation.share),
            round(100 * operation.share, 1),
        )
        for operation in summary.operations[:MOST_OPERATIONS]
    )
    return WindowView(
        name=window.name,
        summary=summary,
        figures=figures,
        chart=step_chart(summary.steps, figures) if figures else None,
        shares=shares_bar(figures) if figures else (),
        operations=operations,
        memory=tuple((device, size(peak)) for device, peak in summary.peak_memory.items() if peak is not None),
        stages=stages_chart(summary.pipeline) if summary.pipeline else None,
        layers=layers_chart(summary),
        kinds=kind_rows(summary),
        memory_chart=memory_chart(summary),
        communication=_communication(summary),
    )


def memory_chart(summary: ProfileSummary) -> LineChart | None:
    """Draws the memory in use over the window, or returns `None` if it isn't known."""
    series = [
        # Host memory (the process's RSS) isn't tracked by any allocator in the trace.
        Series("memory", use.name if use.name == "host" else f"allocator {use.name}", "", *map(np.array, use[1:]))
        for use in summary.memory
    ]
    return line_chart("Memory in use in the window", series[:MOST_LINES], size, False, "batch")


def _communication(summary: ProfileSummary) -> str:
    """A sentence on how much of collectives is hidden, or `""` without any."""
    found = summary.communication
    if not found:
        return ""
    per_batch = milliseconds(found.milliseconds / (len(summary.steps) or 1))
    return (
        f"Collectives take {per_batch} per batch. {share(found.share)} of this time is hidden: meanwhile the same "
        "device computes. The times above leave it out."
    )


def overview(windows: Sequence[ProfiledWindow]) -> tuple[tuple[str, ...], ...]:
    """A row for every window: its name, steps, median, 95th percentile and shares."""
    return tuple(_row(window) for window in windows)


def _row(window: ProfiledWindow) -> tuple[str, ...]:
    """The cells of a window in the overview."""
    figures = figures_of(window.summary.steps)
    if figures is None:
        return (window.name, "0", *["n/a"] * (2 + len(PARTS)))
    shares = (share(figures.shares[part]) for part in PARTS)
    return (window.name, count(figures.count), milliseconds(figures.median), milliseconds(figures.p95), *shares)


def shorten(name: str) -> str:
    """Elides the middle of a very long name."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def stages_chart(times: PipelineTime) -> LanesChart:
    """Draws the stages of a pipeline, with a lane for each device."""
    x_axis = axis_for([times.duration], milliseconds, may_be_logarithmic=False)
    keys = sorted({(piece.stage, piece.column) for piece in times.work})
    height = 100 / max(1, len(keys))
    lanes = tuple(_lane(times, key, index * height, height, x_axis) for index, key in enumerate(keys))
    devices = f" and up to {times.columns} devices each, a, b and so on" if times.columns > 1 else ""
    bubble = (
        f"Stages wait {share(times.bubble)} of the time between their first and last operation, over all batches. "
        f"{count(times.stages)} stages of equal time would wait {share(times.ideal)} with {count(times.microbatches)} "
        f"micro-batches{devices}."
    )
    description = f"{len(lanes)} lanes, one for each device of a stage, with the micro-batches it computes. {bubble}"
    return LanesChart(
        title=f"Stages in batch {count(times.step)}",
        x_axis=x_axis,
        lanes=lanes,
        legend=tuple((kind, f"{kind}, with the number of the micro-batch") for kind in ("forward", "backward")),
        heads=("stage", "forward", "backward"),
        rows=tuple((lane.name, *_sums(times, key)) for lane, key in zip(lanes, keys, strict=True)),
        description=description,
        note=bubble,
    )


def _lane(times: PipelineTime, key: tuple[int, int], top: float, height: float, x_axis: Axis) -> Lane:
    """The lane of a stage's device, which `key` names by stage and column, with a box for each piece of its work."""
    stage, column = key
    name = f"stage {stage}{_letters(column) if times.columns > 1 else ''}"
    work = sorted((piece for piece in times.work if (piece.stage, piece.column) == key), key=lambda piece: piece.begins)
    boxes = tuple(_box(piece, work[index + 1 :], name, x_axis) for index, piece in enumerate(work))
    return Lane(name, round(top + 0.1 * height, 2), round(0.8 * height, 2), boxes)


def _sums(times: PipelineTime, key: tuple[int, int]) -> list[str]:
    """The forward and backward times of a stage's device, formatted; `key` is its stage and column."""
    work = [piece for piece in times.work if (piece.stage, piece.column) == key]
    return [milliseconds(sum(piece.duration for piece in work if piece.backward is back)) for back in (False, True)]


def _letters(column: int) -> str:
    """Names a device of a stage: a to z, then aa, ab and so on."""
    return (_letters(column // 26 - 1) if column >= 26 else "") + chr(ord("a") + column % 26)


def _box(work: StageWork, later: Sequence[StageWork], name: str, x_axis: Axis) -> Box:
    """The box of a stage's work on a micro-batch, with its number unless work that is drawn `later` covers that."""
    left, right = x_axis.position(work.begins), x_axis.position(work.begins + work.duration)
    kind = "backward" if work.backward else "forward"
    tooltip = f"{name}, micro-batch {work.micro_batch}, {kind}: {milliseconds(work.duration)}"
    width = round(right - left, 2)
    # A CPU may compute several micro-batches at once, whose boxes overlap.
    middle = work.begins + work.duration / 2
    hidden = any(other.begins - work.duration / 4 <= middle <= other.begins + other.duration for other in later)
    number = "" if hidden or width < _LEAST_NUMBERED else str(work.micro_batch)
    return Box(kind, left, width, number, tooltip)
