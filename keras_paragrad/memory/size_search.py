"""The search for the largest size that takes no more than a limit, in few measurements."""

import bisect
from collections.abc import Callable, Sequence


def nice_sizes(most: int) -> list[int]:
    """Numbers of up to four binary digits and zeros, up to `most`, which is the last."""
    powers = range(most.bit_length())
    return sorted({size for power in powers for digits in range(1, 16) if (size := digits << power) < most} | {most})


def largest(
    sizes: Sequence[int],
    limit: int,
    measure: Callable[[int], int | None],
    first: int,
    line: tuple[float, float] | None,
) -> int | None:
    """The largest size that takes no more than `limit`, if sizes take the more the larger they are.

    Looks where what was measured before says that the limit is, and ends when a size fits and the next one doesn't, or
    two sizes say that it doesn't.

    Args:
        sizes: The sizes, in ascending order.
        limit: The limit, in bytes.
        measure: The bytes that a size takes; `None` if it takes too much.
        first: The index of the size to begin with.
        line: What is expected: the bytes without rows, and those of a row.
    """
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
            # Half of what was too much, or between that and what fits.
            half = bisect.bisect_right(sizes, sizes[index] // 2) - 1
            index = (low + high) // 2 if low >= 0 else half
        else:
            index = bisect.bisect_right(sizes, _rows_at(limit, points, line)) - 1
            if index <= low and len(points) > 1:
                break
        index = min(max(index, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _rows_at(limit: int, points: Sequence[tuple[int, int]], line: tuple[float, float] | None) -> float:
    """The number of rows that are expected to take `limit`."""
    (rows, used), constant = points[-1], line[0] if line else 0.0
    others = [point for point in points[:-1] if point[0] != rows]
    if others:
        other, used_there = others[-1]
        slopes = [(used - used_there) / (rows - other)]
    else:
        # What is off may be each row's, or the same for all.
        slopes = [(used - constant) / rows, *(line[1:] if line else ())]
    expected = [rows + (limit - used) / slope if slope > 0 else float("inf") for slope in slopes]
    return sum(expected) / len(expected)
