"""The ledger has cases that there are, in lines that two runs share, and says what the documentation does."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from foreign.keras_io.expectations import expected
from ledger.cases import Found, every
from ledger.run import LEDGER, differences, kind_of

pytestmark = pytest.mark.fast
RECORDED = json.loads(LEDGER.read_text())


def test_every_outcome_is_of_a_case():
    assert RECORDED.keys() <= every().keys()
    assert {kind_of(each) for each in RECORDED.values()} <= {"exact", "warned", "refused", "wrong", "error", "timeout"}


def test_the_census_expects_what_was_measured():
    """Where a number is wrong or a case didn't end, the tests of miniatures fail."""
    for case, outcome in RECORDED.items():
        part, *of = case.split("/")
        if part == "census" and kind_of(outcome) in ("exact", "warned", "refused"):
            wanted = expected(*of)
            kind = "refused" if wanted.refused is not None else "exact" if wanted.warned is None else "warned"
            assert kind_of(outcome) == kind, case


def test_a_line_is_the_same_in_each_run():
    one = Found("refused", "'dense_12' of /tmp/x1/model.py is 1.5e-03 off,\n on 8 of conv2d's rows").recorded
    other = Found("refused", "'dense_3' of /tmp/y/model.py is 0.2 off,\n on 8 of conv2d's rows").recorded
    assert one == other == "refused: 'dense_#' of PATH is # off, on # of conv2d's rows"
    assert Found("exact").recorded == "exact"


def test_what_was_lost_is_shown_first():
    before = {"a": "refused: it divides", "b": "exact", "c": "exact", "d": "exact: weighting='examples'"}
    after = {"a": "exact", "b": "exact", "c": "refused: it divides", "d": "exact", "e": "exact"}
    assert [each.partition(":")[0] for each in differences(before, after)] == ["c", "a", "d", "e"]
