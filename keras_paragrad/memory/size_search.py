"""Searches for the largest size whose cost is within a limit, with few measurements."""

import bisect
from collections.abc import Callable, Sequence


def nice_sizes(most: int) -> list[int]:
    """Sizes of the form `k * 2**n` with `k < 16`, up to `most`, which is the last."""
    powers = range(most.bit_length())
    return sorted({size for power in powers for digits in range(1, 16) if (size := digits << power) < most} | {most})


def largest(
    sizes: Sequence[int],
    limit: int,
    measure: Callable[[int], int | None],
    first: int,
    line: tuple[float, float] | None,
) -> int | None:
    """Returns the largest size whose cost is at most `limit`, if the cost grows with the size.

    Extrapolates from the sizes measured so far to the limit. Ends when a size fits and the next one doesn't fit, or
    isn't expected to.

    Args:
        sizes: The sizes, in ascending order.
        limit: The limit, in bytes.
        measure: Returns the bytes that a size takes, or `None` if the memory ran out.
        first: The index of the size to begin with.
        line: The expected cost: fixed bytes, and bytes per row; `None` if unknown.
    """
    # The index of the largest size that fits, and of the smallest that doesn't, so far.
    low, high, index = -1, len(sizes), first
    points: list[tuple[int, int]] = []
    while True:
        used = measure(sizes[index])
        points += [] if used is None else [(sizes[index], used)]
        fits = used is not None and used <= limit
        low, high = (index, high) if fits else (low, index)
        if high - low <= 1:
            break
        if used is None:
            # Half of the smallest size that was too large, or between it and the largest size that fits.
            half = bisect.bisect_right(sizes, sizes[index] // 2) - 1
            index = (low + high) // 2 if low >= 0 else half
        else:
            index = bisect.bisect_right(sizes, _rows_at(limit, points, line)) - 1
            # The next size isn't expected to fit.
            if index <= low and len(points) > 1:
                break
        index = min(max(index, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _rows_at(limit: int, points: Sequence[tuple[int, int]], line: tuple[float, float] | None) -> float:
    """The rows whose expected cost is `limit`, by the last two points, or by one point and a line of bytes per row."""
    (rows, used), constant = points[-1], line[0] if line else 0.0
    others = [point for point in points[:-1] if point[0] != rows]
    if others:
        other, used_there = others[-1]
        slopes = [(used - used_there) / (rows - other)]
    else:
        # The line's constant or its slope may be wrong: extrapolate with each, and the measured point, and average.
        slopes = [(used - constant) / rows, *(line[1:] if line else ())]
    expected = [rows + (limit - used) / slope if slope > 0 else float("inf") for slope in slopes]
    return sum(expected) / len(expected)
