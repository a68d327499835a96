"""Cuts a model into stages that are about equally large."""

import itertools
from collections.abc import Callable, Sequence

from keras_paragrad.distribution.pipeline.calls import Calls

# By how much the largest stage may be larger than it has to, if fewer tensors cross the cuts then.
_SLACK = 1.1


def balanced(calls: Calls, stages: int, sizes: Sequence[int]) -> list[int]:
    """The places of the calls after which a model is cut.

    The largest stage is at most a tenth larger than it has to be; of these cuts, those are taken that the fewest
    tensors cross.
    """
    weighted = [place for place, size in enumerate(sizes) if size]
    candidates = []
    for first, second in itertools.pairwise(weighted):
        allowed = [place for place in range(first, second) if calls.separated(place) is None]
        if allowed:
            candidates.append(min(allowed, key=calls.tensors_across))
    if len(candidates) + 1 < stages:
        raise ValueError(
            f"stages={stages}, but {calls.model.name!r} can be cut into {len(candidates) + 1} at most that have "
            "something to do and share no weights. Write fewer stages, and name as many devices."
        )
    totals = list(itertools.accumulate(sizes))
    ends = [*(totals[place] for place in candidates), totals[-1]]
    across = [*map(calls.tensors_across, candidates), 0]
    smallest = best_cuts(ends, across, stages, lambda largest, crossing: (largest, crossing))
    limit = _SLACK * _largest(smallest, ends)
    fewest = best_cuts(ends, across, stages, lambda largest, crossing: (largest > limit, crossing, largest))
    return [candidates[index] for index in fewest]


def best_cuts(
    ends: Sequence[int], across: Sequence[int], stages: int, rank: Callable[[int, int], tuple]
) -> tuple[int, ...]:
    """The best places to cut at, by dynamic programming.

    Args:
        ends: The sizes summed up to each place that may be cut at, and of all.
        across: How many tensors cross a cut there; 0 for the end.
        stages: How many stages there are to be.
        rank: From the size of the largest stage and the number of tensors across to what is to be small.

    Returns:
        Indices into `ends`.

    Example:

    >>> from keras_paragrad.distribution.pipeline.balance import best_cuts
    >>> best_cuts([4, 5, 6, 12], [1, 1, 1, 0], 2, lambda largest, crossing: (largest, crossing))
    (2,)
    """
    # From where a stage ends to the largest stage up to there, the tensors across, and the cuts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {-1: (0, 0, ())}
    for stage in range(1, stages + 1):
        reached: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in [len(ends) - 1] if stage == stages else range(stage - 1, len(ends) - 1):
            ways = [
                (max(largest, ends[end] - (ends[start] if start >= 0 else 0)), crossing + across[end], (*chosen, end))
                for start, (largest, crossing, chosen) in best.items()
                if start < end
            ]
            if ways:
                reached[end] = min(ways, key=lambda way: rank(*way[:2]))
        best = reached
    return best[len(ends) - 1][2][:-1]


def _largest(chosen: Sequence[int], ends: Sequence[int]) -> int:
    places = [0, *(ends[index] for index in chosen), ends[-1]]
    return max(second - first for first, second in itertools.pairwise(places))
