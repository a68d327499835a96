"""A chart of lanes: bars one below the other, along an axis of time."""

from dataclasses import dataclass

from keras_paragrad.profiling.report.formatting import Axis


@dataclass(frozen=True)
class Box:
    """A part of a lane: its position along it, in percent, and the number in it, `""` if there is none or no room.

    `kind` is its CSS class, which gives its colour.
    """

    kind: str
    left: float
    width: float
    number: str
    tooltip: str


@dataclass(frozen=True)
class Lane:
    """One bar: its position in the chart, in percent.

    Attributes:
        name: The name, written to its left or above it.
        top: The top of its boxes.
        height: Their height.
        boxes: Its parts.
        name_top: The position of a name above it, or `None` for a name to its left.
        is_apart: Whether it differs in kind from the others, so that its name is in italics.
    """

    name: str
    top: float
    height: float
    boxes: tuple[Box, ...]
    name_top: float | None = None
    is_apart: bool = False


@dataclass(frozen=True)
class LanesChart:
    """Lanes, with their table.

    Attributes:
        title: What the chart shows.
        x_axis: The axis of time.
        lanes: The lanes.
        legend: The kinds of boxes, and their names.
        heads: The column headers of the table.
        rows: The cells of each row of the table.
        description: A sentence for screen readers.
        note: Remarks for readers.
    """

    title: str
    x_axis: Axis
    lanes: tuple[Lane, ...]
    legend: tuple[tuple[str, str], ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    description: str
    note: str

    @property
    def rows_high(self) -> float:
        """The height of the chart, in rows of text."""
        above = any(lane.name_top is not None for lane in self.lanes)
        return (2.4 if above else 2.2) * len(self.lanes) + (0 if above else 1)
