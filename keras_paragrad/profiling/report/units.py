"""Formats numbers for people, with units."""

import math
from typing import TypeGuard

UNKNOWN = "n/a"


def milliseconds(value: float | None) -> str:
    """A time of `value` milliseconds, in a suitable unit.

    Example:

    >>> from keras_paragrad.profiling.report.units import milliseconds
    >>> milliseconds(0.25), milliseconds(2.5), milliseconds(12345)
    ('250 µs', '2.5 ms', '12.3 s')
    """
    return _scaled(value, (("µs", 1e-3), ("ms", 1.0), ("s", 1e3)))


def size(value: float | None) -> str:
    """Bytes, in binary units."""
    return _scaled(value, (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40)))


def operations(value: float | None) -> str:
    """A count of floating-point operations."""
    return _scaled(value, (("FLOP", 1.0), ("kFLOP", 1e3), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12)))


def share(value: float | None) -> str:
    """A fraction, in percent."""
    if not _is_number(value):
        return UNKNOWN
    return f"{value * 100:.1f}%" if 0 < abs(value) < 0.0995 else f"{value * 100:.0f}%"


def change(before: float | None, after: float | None) -> str:
    """The change from `before` to `after`, in percent of `before`."""
    if not _is_number(before) or not _is_number(after) or not before:
        return UNKNOWN
    return _signed((after - before) / abs(before) * 100, "%")


def points(before: float | None, after: float | None) -> str:
    """The change of a share, in percentage points."""
    if not _is_number(before) or not _is_number(after):
        return UNKNOWN
    return _signed((after - before) * 100, " points")


def count(value: float | None) -> str:
    """An integer, with thousands separators."""
    return f"{value:,.0f}" if _is_number(value) else UNKNOWN


def number(value: float | None) -> str:
    """A number with three significant digits, with all digits before the point from 1,000 to a million.

    Example:

    >>> from keras_paragrad.profiling.report.units import number
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


def _signed(value: float, unit: str) -> str:
    return f"{value:+.1f}{unit}" if abs(value) >= 0.05 else f"0{unit}"


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
