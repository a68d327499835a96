"""Numbers for people: with units, and on the axes of charts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

UNKNOWN = "n/a"
_TIMES = (("µs", 1e-3), ("ms", 1.0), ("s", 1e3))
_SIZES = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
_OPERATIONS = (("FLOP", 1.0), ("kFLOP", 1e3), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12))


def milliseconds(value: float | None) -> str:
    """A time of `value` milliseconds, in a suitable unit.

    Example:

    >>> from keras_paragrad.profiling.report.formatting import milliseconds
    >>> milliseconds(0.25), milliseconds(2.5), milliseconds(12345)
    ('250 µs', '2.5 ms', '12.3 s')
    """
    return _scaled(value, _TIMES)


def size(value: float | None) -> str:
    """Bytes, in binary units."""
    return _scaled(value, _SIZES)


def operations(value: float | None) -> str:
    """A count of floating-point operations."""
    return _scaled(value, _OPERATIONS)


def share(value: float | None) -> str:
    """A fraction, in percent."""
    if not _is_number(value):
        return UNKNOWN
    return f"{value * 100:.1f}%" if 0 < abs(value) < 0.0995 else f"{value * 100:.0f}%"


def count(value: float | None) -> str:
    """An integer, with thousands separators."""
    return f"{value:,.0f}" if _is_number(value) else UNKNOWN


def number(value: float | None) -> str:
    """A number with three significant digits, with all digits before the point from 1,000 to a million.

    Example:

    >>> from keras_paragrad.profiling.report.formatting import number
    >>> number(0.00001234), number(0.5), number(12345.0), number(float("nan"))
    ('1.23e-05', '0.5', '12,345', 'NaN')
    """
    if value is None:
        return UNKNOWN
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _scaled(value: float | None, units: tuple[tuple[str, float], ...]) -> str:
    """Formats a value in the largest unit that it reaches, or else in the smallest."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    name, scale = next((unit for unit in reversed(units) if abs(value) >= unit[1]), units[0])
    return f"{value / scale:.3g} {name}" if abs(value / scale) < 999.5 else f"{value / scale:,.0f} {name}"


# Nonnegative values whose ratio reaches this are drawn on a logarithmic scale.
_LOGARITHMIC_FROM = 50.0
_ROUND_GAPS = (1.0, 2.0, 2.5, 5.0, 10.0)
MOST_POINTS = 400

Formatter = Callable[[float], str]
_UNITS: dict[Callable[..., str], tuple[tuple[str, float], ...]] = {
    milliseconds: _TIMES,
    size: _SIZES,
    operations: _OPERATIONS,
    share: (("%", 0.01),),
}


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to 0 to 100%, with tick marks labelled by `formatter`."""

    low: float
    high: float
    logarithmic: bool = False
    marks: tuple[float, ...] = ()
    formatter: Formatter = number

    def position(self, value: float) -> float:
        """The position of a value in percent, clipped to the range."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(part, 0.0), 1.0), 2)

    @property
    def units(self) -> str:
        """The units of values with their scales, ascending, for `charts.js`."""
        return "|".join(f"{name}:{scale:g}" for name, scale in _UNITS.get(self.formatter, (("", 1.0),)))

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The position and the label of every mark."""
        return [(self.position(mark), self.formatter(mark)) for mark in self.marks]


def axis_for(
    values: Sequence[float],
    formatter: Formatter = number,
    may_be_logarithmic: bool = True,
    binary: bool = False,
) -> Axis:
    """An axis for finite values: linear from 0, or logarithmic if they are nonnegative and far apart.

    Args:
        values: The values to draw; may be empty.
        formatter: Formats the labels of tick marks.
        may_be_logarithmic: Whether a logarithmic scale is allowed.
        binary: Whether tick marks are spaced by a power of 2, for bytes.

    Example:

    >>> from keras_paragrad.profiling.report.formatting import axis_for
    >>> axis_for([0.2, 3.7]).marks
    (0.0, 1.0, 2.0, 3.0, 4.0)
    >>> axis_for([0.001, 20.0]).marks
    (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    """
    positive = [value for value in values if value > 0]
    if may_be_logarithmic and positive and min(values) >= 0 and max(positive) / min(positive) >= _LOGARITHMIC_FROM:
        return _logarithmic(min(positive), max(positive), formatter)
    return _linear(min([0.0, *values]), max([0.0, *values]), formatter, binary)


def steps_axis(first: float, last: float, formatter: Formatter) -> Axis:
    """An axis for the steps of a run, from its first to its last."""
    if last <= first:
        first, last = first - 0.5, last + 0.5
    gap = _round_gap(max(4.0, last - first) / 4)
    marks = [gap * index for index in range(math.ceil(first / gap), math.floor(last / gap) + 1)]
    return Axis(first, last, False, tuple(mark for mark in marks if mark.is_integer()), formatter)


def _linear(low: float, high: float, formatter: Formatter, binary: bool) -> Axis:
    """A linear axis, with about four round gaps between marks."""
    if low == high:
        high = low + 1.0
    gap = 2.0 ** math.ceil(math.log2((high - low) / 4)) if binary else _round_gap((high - low) / 4)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    marks = tuple(gap * index for index in range(first, last + 1))
    return Axis(marks[0], marks[-1], False, marks, formatter)


def _logarithmic(low: float, high: float, formatter: Formatter) -> Axis:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    return Axis(10.0**first, 10.0**last, True, tuple(float(f"1e{power}") for power in powers), formatter)


def _round_gap(gap: float) -> float:
    """The smallest of `_ROUND_GAPS` times a power of ten that is at least `gap`."""
    magnitude = 10.0 ** math.floor(math.log10(gap))
    return next(round_gap * magnitude for round_gap in _ROUND_GAPS if round_gap * magnitude >= gap * (1 - 1e-9))


def select_points(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices of at most `most` values to draw, for `most` of at least 5: the extremes of equally long spans.

    Each span keeps its smallest, its largest and its first non-finite value; the first and last value stay too.
    """
    if len(values) <= most:
        return np.arange(len(values))
    per_span = 2 if np.isfinite(values).all() else 3
    spans = np.array_split(np.arange(len(values)), (most - 2) // per_span)
    inside = [index for span in spans for index in _extremes(values, span)]
    return np.unique([0, *inside, len(values) - 1])


def _extremes(values: np.ndarray, span: np.ndarray) -> list[int]:
    is_finite = np.isfinite(values[span])
    finite, nonfinite = span[is_finite], span[~is_finite]
    extremes = [finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]] if len(finite) else []
    return [*extremes, *nonfinite[:1]]
