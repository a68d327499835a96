"""The report's view of a trace window."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_paragrad.profiling.report.axes import Axis, axis_for
from keras_paragrad.profiling.report.bars import Segment, StepChart, shares_bar, step_chart
from keras_paragrad.profiling.report.figures import PARTS, StepFigures, figures_of
from keras_paragrad.profiling.report.runs import ProfiledWindow
from keras_paragrad.profiling.report.units import count, milliseconds, share, size
from keras_paragrad.profiling.summary import PipelineTime, ProfileSummary, StageWork

_PASSES = ("forward", "backward")
# In percent of the chart: narrower boxes have no room for a number.
_LEAST_NUMBERED = 1.6


@dataclass(frozen=True)
class Box:
    """What a device did for a while.

    Attributes:
        kind: `"forward"` or `"backward"`.
        left, width: Where it is along the lane, in percent.
        number: The micro-batch's, or `""` where it could not be read.
        words: Its tooltip.
    """

    kind: str
    left: float
    width: float
    number: str
    words: str


@dataclass(frozen=True)
class Lane:
    """A device of a stage.

    Attributes:
        name: As `stage 0`, and `stage 0b` for its second device.
        top, height: Where it is in the chart, in percent.
        boxes: What the device did.
        cells: Its row in the table: name, milliseconds forward and backward.
    """

    name: str
    top: float
    height: float
    boxes: tuple[Box, ...]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class StagesChart:
    """The stages of a pipeline in one step.

    Attributes:
        title: Of which step.
        across: The axis of time.
        lanes: The stages' devices.
        words: A sentence that describes the chart for screen readers.
        bubble: The share of waiting, measured, and that of stages of equal time, in words.
    """

    title: str
    across: Axis
    lanes: tuple[Lane, ...]
    words: str
    bubble: str


def stages_chart(found: PipelineTime) -> StagesChart:
    """The chart of a pipeline."""
    across = axis_for([found.duration], milliseconds, may_be_logarithmic=False)
    keys = sorted({(each.stage, each.column) for each in found.work})
    height = 100 / max(1, len(keys))
    lanes = tuple(_lane(found, key, index * height, height, across) for index, key in enumerate(keys))
    devices = f" and up to {found.columns} devices each, a, b and so on" if found.columns > 1 else ""
    bubble = (
        f"Stages wait {share(found.bubble)} of the time between their first and last operation, over all steps. "
        f"{count(found.stages)} stages of equal time would wait {share(found.ideal)} with {count(found.microbatches)} "
        f"micro-batches{devices}."
    )
    words = f"{len(lanes)} lanes, one for each device of a stage, with the micro-batches it computes. {bubble}"
    return StagesChart(f"Stages in step {count(found.step)}", across, lanes, words, bubble)


def _lane(found: PipelineTime, key: tuple[int, int], top: float, height: float, across: Axis) -> Lane:
    stage, column = key
    name = f"stage {stage}{_letters(column) if found.columns > 1 else ''}"
    own = sorted((each for each in found.work if (each.stage, each.column) == key), key=lambda each: each.begins)
    sums = [sum(each.duration for each in own if each.backward is backward) for backward in (False, True)]
    boxes = tuple(_box(each, own[index + 1 :], name, across) for index, each in enumerate(own))
    return Lane(name, round(top + 0.1 * height, 2), round(0.8 * height, 2), boxes, (name, *map(milliseconds, sums)))


def _letters(column: int) -> str:
    return (_letters(column // 26 - 1) if column >= 26 else "") + chr(ord("a") + column % 26)


def _box(work: StageWork, later: Sequence[StageWork], name: str, across: Axis) -> Box:
    left, right = across.place(work.begins), across.place(work.begins + work.duration)
    kind = _PASSES[work.backward]
    words = f"{name}, micro-batch {work.micro_batch}, {kind}: {milliseconds(work.duration)}"
    width = round(right - left, 2)
    # Devices of a CPU compute several micro-batches at once.
    middle = work.begins + work.duration / 2
    hidden = any(each.begins - work.duration / 4 <= middle <= each.begins + each.duration for each in later)
    number = "" if hidden or width < _LEAST_NUMBERED else str(work.micro_batch)
    return Box(kind, left, width, number, words)


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
