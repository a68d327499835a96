"""The steps of a window: their median, 95th percentile and parts, and a chart of them as stacked bars."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.formatting import Axis, axis_for, count, milliseconds, select_points, share
from keras_paragrad.profiling.summary import PARTS, StepTime, shares_of

MOST_BARS = 60
_MOST_LABELS = 5
PART_NAMES = {
    "input": "waiting for input",
    "host": "host",
    "compile": "compiling",
    "compute": "compute",
    "collective": "collectives",
    "idle": "idle",
}


@dataclass(frozen=True)
class StepFigures:
    """Statistics of a window's step times, in milliseconds, and each part's fraction of the total time."""

    count: int
    median: float
    p95: float
    longest: float
    shares: dict[str, float]


def figures_of(steps: Sequence[StepTime]) -> StepFigures | None:
    """The statistics of some steps, or `None` if there are none."""
    if not steps:
        return None
    durations = np.array([step.duration for step in steps])
    return StepFigures(
        count=len(steps),
        median=float(np.median(durations)),
        p95=float(np.percentile(durations, 95)),
        longest=float(durations.max()),
        shares=shares_of(steps),
    )


@dataclass(frozen=True)
class Segment:
    """A part of a bar: `start` and `length` along the bar, in percent of the chart."""

    part: str
    start: float
    length: float
    tooltip: str


@dataclass(frozen=True)
class Bar:
    """One step: its position on the axis of steps, in percent, and its row in the table."""

    step: int
    left: float
    width: float
    segments: tuple[Segment, ...]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class StepChart:
    """All steps of a window.

    Attributes:
        y_axis: The axis of time.
        bars: The steps.
        labels: Positions of some steps, in percent, and their numbers.
        median, p95: Positions of the median and the 95th percentile, in percent.
        parts: The parts that occur.
        description: A sentence for screen readers.
        note: What was left out, or `""`.
    """

    y_axis: Axis
    bars: tuple[Bar, ...]
    labels: tuple[tuple[float, str], ...]
    median: float
    p95: float
    parts: tuple[str, ...]
    description: str
    note: str


def step_chart(steps: Sequence[StepTime], figures: StepFigures) -> StepChart:
    """Draws the steps of a window as bars."""
    chosen = select_points(np.array([step.duration for step in steps]), MOST_BARS)
    drawn = [steps[index] for index in chosen]
    y_axis = axis_for([figures.longest], milliseconds, may_be_logarithmic=False)
    bars_per_label = -(-len(drawn) // _MOST_LABELS)
    width = 100 / len(drawn)
    bars = tuple(_bar(step, index * width, width, y_axis) for index, step in enumerate(drawn))
    note = ""
    if len(drawn) < len(steps):
        note = f"{len(drawn)} of {count(len(steps))} batches are drawn: the shortest and the longest of each span."
    return StepChart(
        y_axis=y_axis,
        bars=bars,
        labels=tuple((bar.left + bar.width / 2, bar.cells[0]) for bar in bars[::bars_per_label]),
        median=y_axis.position(figures.median),
        p95=y_axis.position(figures.p95),
        parts=_parts(figures),
        description=(
            f"Time of {count(len(steps))} batches, each divided into {', '.join(PART_NAMES.values())}. Median "
            f"{milliseconds(figures.median)}, 95th percentile {milliseconds(figures.p95)}."
        ),
        note=note,
    )


def shares_bar(figures: StepFigures) -> tuple[Segment, ...]:
    """Each part's fraction of the total step time as one bar."""
    segments: list[Segment] = []
    start = 0.0
    for part in _parts(figures):
        length = round(100 * figures.shares[part], 2)
        segments.append(Segment(part, round(start, 2), length, f"{PART_NAMES[part]}: {share(figures.shares[part])}"))
        start += length
    return tuple(segments)


def _parts(figures: StepFigures) -> tuple[str, ...]:
    return tuple(part for part in PARTS if figures.shares[part] > 0)


def _bar(step: StepTime, left: float, width: float, y_axis: Axis) -> Bar:
    """The bar of a step: a segment for each part of its time, from the bottom."""
    segments: list[Segment] = []
    start = 0.0
    for part in PARTS:
        time = getattr(step, part)
        if time > 0:
            low, high = y_axis.position(start), y_axis.position(start + time)
            tooltip = f"batch {step.step}, {PART_NAMES[part]}: {milliseconds(time)}"
            segments.append(Segment(part, round(100 - high, 2), round(high - low, 2), tooltip))
            start += time
    update = "" if step.update is None else count(step.update)
    times = (step.duration, *(getattr(step, part) for part in PARTS))
    cells = (count(step.step), update, *map(milliseconds, times))
    return Bar(step.step, round(left, 3), round(width * 0.82, 3), tuple(segments), cells)
