"""Chart axes: the position of values and of tick marks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_paragrad.profiling.report.units import number

# From this ratio of the largest to the smallest value on, the scale is logarithmic.
LOGARITHMIC_FROM = 50.0
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """Maps a range of values to 0 to 100%.

    Attributes:
        low: The value at 0.
        high: The value at 100%.
        logarithmic: Whether the scale is logarithmic.
        marks: The values of the tick marks.
        written: Formats a mark's label.
    """

    low: float
    high: float
    logarithmic: bool = False
    marks: tuple[float, ...] = ()
    written: Callable[[float], str] = number

    def place(self, value: float) -> float:
        """The position of a value in percent, clipped to the range."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(100 * min(max(part, 0.0), 1.0), 2)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The position and the label of every mark."""
        return [(self.place(mark), self.written(mark)) for mark in self.marks]


def axis_for(
    values: Sequence[float],
    written: Callable[[float], str] = number,
    may_be_logarithmic: bool = True,
    binary: bool = False,
) -> Axis:
    """An axis for finite values: linear from 0, or logarithmic if they are nonnegative and far apart.

    Args:
        values: The values to draw; may be empty.
        written: Formats a mark's label.
        may_be_logarithmic: Whether a logarithmic scale is allowed.
        binary: Whether marks are spaced by a power of 2, for bytes.

    Example:

    >>> from keras_paragrad.profiling.report.axes import axis_for
    >>> axis_for([0.2, 3.7]).marks
    (0.0, 1.0, 2.0, 3.0, 4.0)
    >>> axis_for([0.001, 20.0]).marks
    (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    """
    positive = [value for value in values if value > 0]
    if may_be_logarithmic and positive and min(values) >= 0 and max(positive) / min(positive) >= LOGARITHMIC_FROM:
        return _logarithmic(min(positive), max(positive), written)
    return _linear(min([0.0, *values]), max([0.0, *values]), written, binary)


def steps_axis(first: float, last: float, written: Callable[[float], str]) -> Axis:
    """An axis for the steps of a run, from its first to its last."""
    if last <= first:
        first, last = first - 0.5, last + 0.5
    gap = _round_gap(max(4.0, last - first) / 4)
    marks = [gap * index for index in range(math.ceil(first / gap), math.floor(last / gap) + 1)]
    return Axis(first, last, False, tuple(mark for mark in marks if mark.is_integer()), written)


def _linear(low: float, high: float, written: Callable[[float], str], binary: bool) -> Axis:
    if low == high:
        high = low + 1.0
    gap = 2.0 ** math.ceil(math.log2((high - low) / 4)) if binary else _round_gap((high - low) / 4)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    marks = tuple(gap * index for index in range(first, last + 1))
    return Axis(marks[0], marks[-1], False, marks, written)


def _logarithmic(low: float, high: float, written: Callable[[float], str]) -> Axis:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    return Axis(10.0**first, 10.0**last, True, tuple(float(f"1e{power}") for power in powers), written)


def _round_gap(gap: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(gap))
    return next(step * magnitude for step in STEPS if step * magnitude >= gap * (1 - 1e-9))
