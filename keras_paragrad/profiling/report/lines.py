"""Line charts over the steps, with the same values as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keras_paragrad.profiling.report.axes import Axis, axis_for, steps_axis
from keras_paragrad.profiling.report.records import Series
from keras_paragrad.profiling.report.thinning import MOST_POINTS, kept
from keras_paragrad.profiling.report.units import count, number, size

# As many lines as a reader can tell apart by colour and dashes.
MOST_LINES = 5
TABLE_ROWS = 12
DOT = "·"


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: The legend entry.
        style: The number of its colour and dashes.
        pieces: The points of every gapless segment in SVG syntax, in a box of 10000 by 1000.
        dots: Isolated points, in percent.
        gaps: Positions of non-finite values, in percent.
        smallest: The smallest value, with its unit and step.
        median: The median, with its unit.
        largest: The largest value, with its unit and step.
        last: The last value, with its unit.
        steps: The first step of those drawn, and how far each is from the one before, for `charts.js`.
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


@dataclass(frozen=True)
class Mark:
    """Where something was left out of the lines.

    Attributes:
        kind: What it was, as the file says.
        place: Where, in percent.
    """

    kind: str
    place: float


@dataclass(frozen=True)
class LineChart:
    """A chart of lines over the steps.

    Attributes:
        title: What it shows, with the unit.
        counted: The unit of the steps axis.
        across: The axis of the steps.
        up: The axis of the values.
        lines: The lines.
        heads: The column headers of the table of values.
        rows: Some steps, with the value of every line.
        notes: What was left out.
        marks: Where something was left out of the values.
        marked: The legend entry of each kind of mark.
    """

    title: str
    counted: str
    across: Axis
    up: Axis
    lines: tuple[Line, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    marks: tuple[Mark, ...] = ()
    marked: tuple[tuple[str, str], ...] = ()

    @property
    def extremes(self) -> tuple[tuple[str, ...], ...]:
        """A row for every line: its name, smallest, median, largest and last value."""
        return tuple((line.name or "value", line.smallest, line.median, line.largest, line.last) for line in self.lines)

    @property
    def words(self) -> str:
        """One or two sentences that describe the chart for screen readers."""
        lines = "; ".join(
            f"{line.name or 'value'}: smallest {line.smallest}, largest {line.largest}, last {line.last}"
            for line in self.lines
        )
        left_out = "".join(f" {words}." for _, words in self.marked)
        return f"{self.title}, over the {self.counted}s. {lines}.{left_out}"


def line_chart(
    title: str,
    series: Sequence[Series],
    written: Callable[[float], str] = number,
    may_be_logarithmic: bool = True,
    counted: str = "step",
    left_out: Mapping[str, Series] | None = None,
) -> LineChart | None:
    """A chart of some series, or `None` if none of them has a value.

    Args:
        title: What it shows, with the unit.
        series: What to draw, at most `MOST_LINES`; their names are the legend.
        written: Formats a value.
        may_be_logarithmic: Whether a logarithmic axis is allowed.
        counted: What a step is: of the training, or an update of the optimizer.
        left_out: The seconds excluded from the values at each step, by description.
    """
    series = [one for one in series if len(one.values)]
    if not series:
        return None
    finite = np.concatenate([one.finite for one in series])
    values = [float(value) for value in finite]
    up = axis_for(values, written, may_be_logarithmic, binary=written is size)
    found = (left_out or {}).items()
    shown = [*series, *(one for _, one in found)]
    across = steps_axis(min(one.steps[0] for one in shown), max(one.steps[-1] for one in shown), count)
    lines = tuple(_line(one, index, across, up, counted) for index, one in enumerate(series))
    title = f"{title}, logarithmic" if up.logarithmic else title
    heads = (counted, *(one.name or "value" for one in series))
    return LineChart(
        *(title, counted, across, up, lines, heads, _table(series, written), _notes(series, up)),
        marks=tuple(Mark(one.quantity, place) for _, one in found for place in _places(one, across)),
        marked=tuple((one.quantity, f"{words}, left out: {number(one.finite.sum())} s") for words, one in found),
    )


def _places(series: Series, across: Axis) -> list[float]:
    """Positions where marks remain distinguishable."""
    return sorted({float(round(across.place(float(step)))) for step in series.steps})


def named(series: Series, name: str) -> Series:
    """The same series under another name."""
    return replace(series, name=name)


def sparkline(series: Series, across: Axis, up: Axis) -> Line:
    """A line of few points, for a table cell."""
    return _line(series, 0, across, up, "update", most=80)


def _line(series: Series, style: int, across: Axis, up: Axis, counted: str, most: int = MOST_POINTS) -> Line:
    chosen = kept(series.values, most)
    steps, values = series.steps[chosen], series.values[chosen]
    finite = np.isfinite(values)
    stretches = np.split(np.arange(len(values)), np.flatnonzero(np.diff(finite)) + 1)
    numbers = [stretch for stretch in stretches if finite[stretch[0]]]
    points = [[(across.place(float(steps[at])), up.place(float(values[at]))) for at in span] for span in numbers]
    return Line(
        name=series.name,
        style=style,
        pieces=tuple(" ".join(_point(*point) for point in stretch) for stretch in points if len(stretch) > 1),
        dots=tuple((x, round(100 - y, 2)) for stretch in points if len(stretch) == 1 for x, y in stretch),
        gaps=tuple(across.place(step) for step in steps[~finite]),
        **_in_words(series, up.written, counted),
        steps=" ".join(f"{gap:.0f}" for gap in np.diff(steps, prepend=0)),
        values="|".join(_value(float(value), up.written) for value in values),
    )


def _point(x: float, y: float) -> str:
    return f"{x * 100:.0f},{1000 - y * 10:.0f}"


def _in_words(series: Series, written: Callable[[float], str], counted: str) -> dict[str, str]:
    finite = series.finite
    if not len(finite):
        return dict.fromkeys(("smallest", "median", "largest", "last"), "not finite")
    steps = series.steps[np.isfinite(series.values)]
    low, high = int(np.argmin(finite)), int(np.argmax(finite))
    return {
        "smallest": f"{written(float(finite[low]))} ({counted} {count(steps[low])})",
        "median": written(float(np.median(finite))),
        "largest": f"{written(float(finite[high]))} ({counted} {count(steps[high])})",
        "last": _value(float(series.values[-1]), written),
    }


def _value(value: float, written: Callable[[float], str]) -> str:
    return written(value) if np.isfinite(value) else number(value)


def _table(series: Sequence[Series], written: Callable[[float], str]) -> tuple[tuple[str, ...], ...]:
    """Some evenly spaced steps, and their values."""
    steps = np.unique(np.concatenate([one.steps for one in series]))
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, TABLE_ROWS).round().astype(int))]
    columns = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    return tuple(
        (count(step), *(_value(float(column[step]), written) if step in column else DOT for column in columns))
        for step in chosen
    )


def _notes(series: Sequence[Series], up: Axis) -> tuple[str, ...]:
    notes = []
    longest = max(len(one.values) for one in series)
    if longest > MOST_POINTS:
        notes.append(
            f"{count(longest)} values, drawn as at most {MOST_POINTS} points: each span's smallest and largest."
        )
    strange = sum(len(one.values) - len(one.finite) for one in series)
    if strange:
        notes.append(f"{count(strange)} values are NaN or infinite: marked ✕ at the upper edge.")
    if up.logarithmic and any((one.finite == 0).any() for one in series):
        notes.append("Values of 0 lie on the lower edge.")
    return tuple(notes)
