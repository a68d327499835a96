"""The stages of a pipeline as lanes: what each of their devices did in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_paragrad.profiling.report.axes import Axis, axis_for
from keras_paragrad.profiling.report.units import count, milliseconds, share
from keras_paragrad.profiling.summary import PipelineTime, StageWork

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
