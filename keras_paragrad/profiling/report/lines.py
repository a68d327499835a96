"""Line charts over the steps, with the same values as a table. A record is a `Series`, drawn as one line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_paragrad.profiling.report.formatting import (
    MOST_POINTS,
    Axis,
    Formatter,
    axis_for,
    count,
    number,
    select_points,
    size,
    steps_axis,
)
from keras_paragrad.profiling.report.runs import Series

# The most lines that a reader can distinguish by colour and dashes.
MOST_LINES = 5
_TABLE_ROWS = 12
_NO_VALUE = "·"


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: The legend entry.
        style: The number of its colour and dashes.
        pieces: The points of every gapless segment in SVG syntax, in a box of 10000 by 1000.
        dots: Isolated points, in percent.
        gaps: Positions of non-finite values, in percent.
        smallest, largest: The extremes, with unit and step.
        median, last: With their unit.
        steps: The first step drawn, and the distance of each from the previous one, for `charts.js`.
        values: The values drawn, with their units, for `charts.js`.
    """

    name: str
    style: int
    pieces: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    gaps: tuple[float, ...]
    smallest: str
    median: str
    largest: str
    last: str
    steps: str
    values: str

    @property
    def stroke(self) -> str:
        """The classes of its colour and dashes: the first five lines differ in both, later ones in either."""
        turn, colour = divmod(self.style, MOST_LINES)
        return f"line-{colour} dashes-{(colour + turn) % MOST_LINES}"


@dataclass(frozen=True)
class Mark:
    """Marks a step where time was excluded: the kind of exclusion, and the position in percent."""

    kind: str
    position: float


@dataclass(frozen=True)
class LineChart:
    """A chart of lines over the steps.

    Attributes:
        title: What it shows, with the unit.
        step_unit: The unit of the steps axis.
        x_axis: The axis of the steps.
        y_axis: The axis of the values.
        lines: The lines.
        heads: The column headers of the table of values.
        rows: Some steps, with the value of every line.
        notes: What was left out.
        marks: Where time was excluded from the values.
        mark_legend: The legend entry of each kind of mark.
    """

    title: str
    step_unit: str
    x_axis: Axis
    y_axis: Axis
    lines: tuple[Line, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    marks: tuple[Mark, ...] = ()
    mark_legend: tuple[tuple[str, str], ...] = ()

    @property
    def extremes(self) -> tuple[tuple[str, ...], ...]:
        """A row for every line: its name, smallest, median, largest and last value."""
        return tuple((line.name or "value", line.smallest, line.median, line.largest, line.last) for line in self.lines)

    @property
    def description(self) -> str:
        """One or two sentences for screen readers."""
        lines = "; ".join(
            f"{line.name or 'value'}: smallest {line.smallest}, largest {line.largest}, last {line.last}"
            for line in self.lines
        )
        excluded = "".join(f" {entry}." for _, entry in self.mark_legend)
        return f"{self.title}, over the {self.step_unit}s. {lines}.{excluded}"


def line_chart(
    title: str,
    series: Sequence[Series],
    formatter: Formatter = number,
    may_be_logarithmic: bool = True,
    step_unit: str = "update",
    excluded: Mapping[str, Series] | None = None,
) -> LineChart | None:
    """A chart of some series, or `None` if none of them has a value.

    Args:
        title: What it shows, with the unit.
        series: At most `MOST_LINES` squared; their names are the legend.
        formatter: Formats a value.
        may_be_logarithmic: Whether a logarithmic axis is allowed.
        step_unit: What the steps are: updates of the optimizer, or batches.
        excluded: The seconds excluded from the values at each step, by description.
    """
    series = [record for record in series if len(record.values)]
    if not series:
        return None
    finite = np.concatenate([record.finite for record in series])
    values = [float(value) for value in finite]
    y_axis = axis_for(values, formatter, may_be_logarithmic, binary=formatter is size)
    marked = (excluded or {}).items()
    drawn = [*series, *(record for _, record in marked)]
    first, last = min(record.steps[0] for record in drawn), max(record.steps[-1] for record in drawn)
    x_axis = steps_axis(math.floor(first), math.ceil(last), count)
    return LineChart(
        title=f"{title}, logarithmic" if y_axis.logarithmic else title,
        step_unit=step_unit,
        x_axis=x_axis,
        y_axis=y_axis,
        lines=tuple(_line(record, index, x_axis, y_axis, step_unit) for index, record in enumerate(series)),
        heads=(step_unit, *(record.name or "value" for record in series)),
        rows=_table(series, formatter),
        notes=_notes(series, y_axis),
        marks=tuple(
            Mark(record.quantity, position)
            for _, record in marked
            # Rounded, so that marks remain distinguishable.
            for position in sorted({float(round(x_axis.position(float(step)))) for step in record.steps})
        ),
        mark_legend=tuple(
            (record.quantity, f"{name}, left out: {number(record.finite.sum())} s") for name, record in marked
        ),
    )


def sparkline(series: Series, x_axis: Axis, y_axis: Axis) -> Line:
    """A line of few points, for a table cell."""
    return _line(series, 0, x_axis, y_axis, "update", most=80)


def _line(series: Series, style: int, x_axis: Axis, y_axis: Axis, step_unit: str, most: int = MOST_POINTS) -> Line:
    """A series drawn between the gaps of its non-finite values, with its statistics.

    Args:
        series: The series.
        style: The number of its colour and dashes.
        x_axis, y_axis: The axes.
        step_unit: What the steps are, for the statistics.
        most: The largest number of points to draw.
    """
    chosen = select_points(series.values, most)
    steps, values = np.round(series.steps[chosen], 3), series.values[chosen]
    finite = np.isfinite(values)
    # Indices of neighbours that are all finite, or all not.
    stretches = np.split(np.arange(len(values)), np.flatnonzero(np.diff(finite)) + 1)
    points = [
        [(x_axis.position(float(steps[index])), y_axis.position(float(values[index]))) for index in stretch]
        for stretch in stretches
        if finite[stretch[0]]
    ]
    return Line(
        name=series.name,
        style=style,
        pieces=tuple(" ".join(_point(*point) for point in stretch) for stretch in points if len(stretch) > 1),
        dots=tuple((x, round(100 - y, 2)) for stretch in points if len(stretch) == 1 for x, y in stretch),
        gaps=tuple(x_axis.position(step) for step in steps[~finite]),
        **_statistics(series, y_axis.formatter, step_unit),
        steps=" ".join(f"{gap:.3f}".rstrip("0").rstrip(".") for gap in np.diff(steps, prepend=0)),
        values="|".join(_format(float(value), y_axis.formatter) for value in values),
    )


def _point(x: float, y: float) -> str:
    return f"{x * 100:.0f},{1000 - y * 10:.0f}"


def _statistics(series: Series, formatter: Formatter, step_unit: str) -> dict[str, str]:
    """The fields of `Line` that describe all values of a series, formatted."""
    finite = series.finite
    if not len(finite):
        return dict.fromkeys(("smallest", "median", "largest", "last"), "not finite")
    steps = series.steps[np.isfinite(series.values)]
    low, high = int(np.argmin(finite)), int(np.argmax(finite))
    return {
        "smallest": f"{formatter(float(finite[low]))} ({step_unit} {_format_step(steps[low])})",
        "median": formatter(float(np.median(finite))),
        "largest": f"{formatter(float(finite[high]))} ({step_unit} {_format_step(steps[high])})",
        "last": _format(float(series.values[-1]), formatter),
    }


def _format_step(step: float) -> str:
    """Formats a step; fractional steps are truncated to tenths."""
    return count(step) if float(step).is_integer() else f"{math.floor(10 * step) / 10:,.1f}"


def _format(value: float, formatter: Formatter) -> str:
    return formatter(value) if np.isfinite(value) else number(value)


def _table(series: Sequence[Series], formatter: Formatter) -> tuple[tuple[str, ...], ...]:
    """Rows of some evenly spaced steps, and their values."""
    steps = np.unique(np.concatenate([record.steps for record in series]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, _TABLE_ROWS).round().astype(int))]
    columns = [dict(zip(record.steps, record.values, strict=True)) for record in series]
    return tuple(
        (
            _format_step(step),
            *(_format(float(column[step]), formatter) if step in column else _NO_VALUE for column in columns),
        )
        for step in chosen
    )


def _notes(series: Sequence[Series], y_axis: Axis) -> tuple[str, ...]:
    """Notes on values that the chart leaves out, or draws at its edge."""
    notes = []
    longest = max(len(record.values) for record in series)
    if longest > MOST_POINTS:
        notes.append(
            f"{count(longest)} values, drawn as at most {MOST_POINTS} points: each span's smallest and largest."
        )
    nonfinite = sum(len(record.values) - len(record.finite) for record in series)
    if nonfinite:
        notes.append(f"{count(nonfinite)} values are NaN or infinite: marked ✕ at the upper edge.")
    if y_axis.logarithmic and any((record.finite == 0).any() for record in series):
        notes.append("Values of 0 lie on the lower edge.")
    return tuple(notes)
