"""How much of an interval is covered by spans that may overlap."""

from collections.abc import Iterable, Sequence

import numpy as np

Span = tuple[float, float]


class Coverage:
    """The time that spans cover, counted once where they overlap.

    Args:
        spans: Pairs of beginning and end, in any order and any unit.

    Example:

    >>> from keras_paragrad.profiling.analysis.coverage import Coverage
    >>> covered = Coverage([(0, 4), (2, 6), (9, 10)])
    >>> float(covered.within(1, 10)), float((covered & Coverage([(5, 20)])).within(0, 30))
    (6.0, 2.0)
    """

    def __init__(self, spans: Iterable[Sequence[float]]):
        ordered = np.array(sorted((begin, end) for begin, end in spans if end > begin), dtype="float64").reshape(-1, 2)
        begins, ends = ordered[:, 0], np.maximum.accumulate(ordered[:, 1]) if len(ordered) else ordered[:, 1]
        new = np.concatenate([[True], begins[1:] > ends[:-1]])[: len(ordered)]
        self.begins = begins[new]
        self.ends = ends[np.concatenate([new[1:], [True]])[: len(ordered)]]
        self._sums = np.concatenate([[0.0], np.cumsum(self.ends - self.begins)])

    def within(self, begin: float, end: float) -> float:
        """How much of the time from `begin` to `end` is covered."""
        return float(self._until(end) - self._until(begin))

    def __or__(self, other: "Coverage") -> "Coverage":
        return Coverage([*self.spans(), *other.spans()])

    def __and__(self, other: "Coverage") -> "Coverage":
        found, mine, yours = [], 0, 0
        while mine < len(self.begins) and yours < len(other.begins):
            begin = max(self.begins[mine], other.begins[yours])
            end = min(self.ends[mine], other.ends[yours])
            if begin < end:
                found.append((begin, end))
            if self.ends[mine] < other.ends[yours]:
                mine += 1
            else:
                yours += 1
        return Coverage(found)

    def spans(self) -> Iterable[Span]:
        return zip(self.begins, self.ends, strict=True)

    def _until(self, moment: float) -> float:
        """How much is covered before a moment."""
        index = int(np.searchsorted(self.begins, moment, side="right"))
        beyond = max(self.ends[index - 1] - moment, 0.0) if index else 0.0
        return self._sums[index] - beyond
