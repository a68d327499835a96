"""Steps as stacked bars: where each step's time went."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.axes import Axis, axis_for
from keras_paragrad.profiling.report.figures import IN_WORDS, PARTS, StepFigures
from keras_paragrad.profiling.report.thinning import kept
from keras_paragrad.profiling.report.units import count, milliseconds, share
from keras_paragrad.profiling.summary import StepTime

MOST_BARS = 60
MOST_NAMED = 5


@dataclass(frozen=True)
class Segment:
    """A part of a bar, in percent of the chart: `start` and `length` go along the bar.

    Attributes:
        part: Which part of a step, as `figures.PARTS` has it.
        start: Where it begins.
        length: How long it is.
        words: Its tooltip.
    """

    part: str
    start: float
    length: float
    words: str


@dataclass(frozen=True)
class Bar:
    """One step.

    Attributes:
        step: Its number.
        left: Where it begins on the axis of steps, in percent.
        width: How wide it is, in percent.
        segments: Its parts.
        cells: Its row in the table: step, update, duration, parts.
    """

    step: int
    left: float
    width: float
    segments: tuple[Segment, ...]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class StepChart:
    """All steps of a window.

    Attributes:
        up: The axis of time.
        bars: The steps.
        names: Where some of them have their numbers, in percent, and these.
        median: The position of the median, in percent.
        p95: The position of the 95th percentile, in percent.
        parts: The parts that occur.
        words: A sentence that describes the chart for screen readers.
        note: What was left out, or `""`.
    """

    up: Axis
    bars: tuple[Bar, ...]
    names: tuple[tuple[float, str], ...]
    median: float
    p95: float
    parts: tuple[str, ...]
    words: str
    note: str


def step_chart(steps: Sequence[StepTime], figures: StepFigures, longest: float) -> StepChart:
    """The steps of a window as bars.

    Args:
        steps: The steps, at least one.
        figures: Their statistics.
        longest: The least upper end of the axis, in milliseconds.
    """
    chosen = kept(np.array([step.duration for step in steps]), MOST_BARS)
    shown = [steps[index] for index in chosen]
    up = axis_for([longest], milliseconds, may_be_logarithmic=False)
    every = -(-len(shown) // MOST_NAMED)
    width = 100 / len(shown)
    bars = tuple(_bar(step, index * width, width, up) for index, step in enumerate(shown))
    names = tuple((bar.left + bar.width / 2, bar.cells[0]) for bar in bars[::every])
    note = ""
    if len(shown) < len(steps):
        note = f"{len(shown)} of {count(len(steps))} steps are drawn: the shortest and the longest of each span."
    words = (
        f"Time of {count(len(steps))} steps, each divided into {', '.join(IN_WORDS.values())}. Median "
        f"{milliseconds(figures.median)}, 95th percentile {milliseconds(figures.p95)}."
    )
    return StepChart(up, bars, names, up.place(figures.median), up.place(figures.p95), _parts(figures), words, note)


def shares_bar(figures: StepFigures) -> tuple[Segment, ...]:
    """The shares of the total step time as one bar."""
    segments: list[Segment] = []
    begins = 0.0
    for part in _parts(figures):
        length = round(100 * figures.shares[part], 2)
        segments.append(Segment(part, round(begins, 2), length, f"{IN_WORDS[part]}: {share(figures.shares[part])}"))
        begins += length
    return tuple(segments)


def _parts(figures: StepFigures) -> tuple[str, ...]:
    return tuple(part for part in PARTS if figures.shares[part] > 0)


def _bar(step: StepTime, left: float, width: float, up: Axis) -> Bar:
    segments: list[Segment] = []
    begins = 0.0
    for part in PARTS:
        took = getattr(step, part)
        if took > 0:
            low, high = up.place(begins), up.place(begins + took)
            words = f"step {step.step}, {IN_WORDS[part]}: {milliseconds(took)}"
            segments.append(Segment(part, round(100 - high, 2), round(high - low, 2), words))
            begins += took
    update = "" if step.update is None else count(step.update)
    times = (step.duration, *(getattr(step, part) for part in PARTS))
    cells = (count(step.step), update, *map(milliseconds, times))
    return Bar(step.step, round(left, 3), round(width * 0.82, 3), tuple(segments), cells)
