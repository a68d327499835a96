"""Which parts of a model to recompute: where to cut, and what is worth it."""

from collections.abc import Sequence
from typing import NamedTuple

from keras_paragrad.memory.measure import Cost, Measured

# Sizes of the largest segment that are tried.
_TRIED = 40
# What recomputation has to free for its time, as a share of what the whole model keeps for its time.
_WORTH = 0.5
# How much more memory is the same.
_SAME = 1.02


class Span(NamedTuple):
    """Consecutive parts, from the first up to the last without it.

    Attributes:
        first: Index of the first part.
        last: Index after the last part.
        recomputed: Whether it runs again in the backward pass.
    """

    first: int
    last: int
    recomputed: bool

    def kept(self) -> "Span":
        """The same, not recomputed."""
        return Span(self.first, self.last, False)


def every_few(count: int, parts: int) -> list[Span]:
    """Segments of so many parts each; all but the last are recomputed, as its backward pass comes first."""
    starts = range(0, parts, count)
    return [Span(first, min(first + count, parts), first + count < parts) for first in starts]


def best_segments(found: Measured) -> list[Span]:
    """The segments that need the least memory, of which those are recomputed that free enough for their time."""
    costs = found.parts
    cuts = _best_cuts(found)
    whole = sum(cost.kept + cost.leaving for cost in costs), sum(cost.work for cost in costs)
    segments = []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        freed = _inside(costs[first:last]) - (found.entering[first] - _kept_before(costs, first))
        work = sum(cost.work for cost in costs[first:last])
        worth = freed * whole[1] > _WORTH * work * whole[0] and all(cost.repeatable for cost in costs[first:last])
        segments.append(Span(first, last, worth))
    return _without_last(found, segments)


def _without_last(found: Measured, segments: list[Span]) -> list[Span]:
    """Without those at the end that free nothing, as what they keep is let go of before others run again."""
    peak = kept_bytes(found, segments)
    for index in reversed(range(len(segments))):
        fewer = [*segments[:index], segments[index].kept(), *segments[index + 1 :]]
        if kept_bytes(found, fewer) > _SAME * peak:
            break
        segments = fewer
    return segments


def kept_bytes(found: Measured, segments: Sequence[Span]) -> float:
    """The most bytes that are held at once: after the forward pass, or while a segment runs again."""
    held, again = 0.0, 0.0
    for first, last, recomputed in segments:
        inside = _inside(found.parts[first:last])
        if recomputed:
            held += found.entering[first]
            again = max(again, held + inside)
        else:
            held += _kept_before(found.parts, first) + inside
    return max(held, again)


def _inside(costs: Sequence[Cost]) -> float:
    """What a segment keeps beside what goes into it and what goes on."""
    return sum(cost.kept for cost in costs) + sum(cost.leaving for cost in costs[:-1])


def _kept_before(costs: Sequence[Cost], first: int) -> float:
    """What is kept of what goes into a segment, if it is not recomputed."""
    return costs[first - 1].leaving if first else 0.0


def _best_cuts(found: Measured) -> list[int]:
    """Where to cut so that the largest segment and all that enters segments are smallest together."""
    total, least = _inside(found.parts), max(cost.kept for cost in found.parts)
    sizes = [least + (total - least) * (step / _TRIED) ** 2 for step in range(_TRIED + 1)]
    cuts = [_cuts_below(size, found) for size in sizes]
    entering = [sum(found.entering[cut] for cut in each[:-1]) for each in cuts]
    return min(zip(sizes, entering, cuts, strict=True), key=lambda each: each[0] + each[1])[2]


def _cuts_below(size: float, found: Measured) -> list[int]:
    """The cuts with the least entering segments, if none keeps more than a size."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(1, len(found.parts) + 1):
        held, options = 0.0, []
        for first in range(last - 1, -1, -1):
            held += found.parts[first].kept + (found.parts[first].leaving if first < last - 1 else 0)
            if held > size * (1 + 1e-9) and options:
                break
            options.append((best[first][0] + found.entering[first], first))
        best.append(min(options))
    cuts = [len(found.parts)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return cuts[::-1]
