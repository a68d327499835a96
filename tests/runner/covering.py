"""Of a test's combinations of parameters, a few: the first, or those that cover all values or all pairs of them."""

import collections
import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import hypothesis
import pytest


def examples(count: int, of: int = 0) -> hypothesis.settings:
    """So many examples of a test that is slow; where CASES is set, as many as that, or `of` if those are more."""
    return hypothesis.settings(max_examples=max(int(os.environ["CASES"]), of) if "CASES" in os.environ else count)


def mark_long(items: Iterable[pytest.Function]) -> None:
    """Marks as `long`, of tests marked `few` or `covering`, the cases that `make test` does without.

    Args:
        items: What pytest has collected.
    """
    by_function = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("long"):
            by_function[item.parent, getattr(item, "originalname", item.name)].append(item)
    for cases in by_function.values():
        kept = _kept(cases)
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.long)


def _kept(cases: Sequence[pytest.Function]) -> Collection[int]:
    few, covering = (cases[0].get_closest_marker(name) for name in ("few", "covering"))
    if few:
        count, *also = few.args
        return {*range(count), *(index for index, case in enumerate(cases) if case.callspec.id in also)}
    if not covering:
        return range(len(cases))
    rows = [[_key(value) for value in case.callspec.params.values()] for case in cases]
    return chosen(rows, covering.kwargs.get("strength", 1))


def chosen(rows: Sequence[Sequence[Any]], strength: int) -> set[int]:
    """The indices of rows in which every value occurs that occurs in any, or every pair, or more; greedily chosen.

    Args:
        rows: Combinations of hashable values.
        strength: How many values of a row are looked at together.
    """
    parts = [set(itertools.combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing, kept = set().union(*parts), set()
    used = collections.Counter()
    while missing:
        # Of those that cover as much, the one whose values have been used least.
        best = max(range(len(rows)), key=lambda index: (len(parts[index] & missing), -_uses(used, rows[index]), -index))
        kept.add(best)
        missing -= parts[best]
        used.update(enumerate(rows[best]))
    return kept


def _uses(used: collections.Counter, row: Sequence[Any]) -> int:
    return sum(used[each] for each in enumerate(row))


def _key(value: Any) -> Any:
    """Lists and dictionaries, which can't be hashed, by what they print."""
    return (type(value), value) if isinstance(value, (str, int, float)) else repr(value)
