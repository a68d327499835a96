"""Of a test's combinations of parameters, a few that cover all values or all pairs of them."""

import collections
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest


def examples(count: int) -> hypothesis.settings:
    """So many examples of a test that compiles each, unless CASES says how many."""
    return hypothesis.settings(max_examples=int(os.environ.get("CASES", str(count))))


def mark_long(items: Iterable[pytest.Function]) -> None:
    """Marks as `long`, of tests marked `covering`, the cases that a covering set does without.

    Args:
        items: What pytest has collected.
    """
    by_function = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("long"):
            by_function[item.parent, item.originalname].append(item)
    for cases in by_function.values():
        strength = cases[0].get_closest_marker("covering").kwargs.get("strength", 1)
        kept = chosen([[_key(value) for value in case.callspec.params.values()] for case in cases], strength)
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.long)


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
