"""The short form of `make fuzz`: a few fixed cases, and the fuzzer's own parts."""

from pathlib import Path

import pytest
from fuzz.cases import AXES, brief, drawn, read, settled, simpler, written
from fuzz.outcomes import outside
from fuzz.rules import RULES, applying
from fuzz.run import shrunk

DOCS = Path(__file__).parents[1] / "docs"

# Cases that take seconds, in which each of the axes of components is met; after the first four, in `make test-all`.
SHORT = {
    '{"devices": "mesh of columns", "steps": 2, "step": "guide"}': "by design",
    '{"devices": "replicas", "transform": "scaled", "rows": 31, "model": "two inputs", "decay": 0.02}': "same",
    '{"slices": 3, "model": "counting"}': "same",
    '{"steps": 3, "rows": 25, "weights": "some zero", "loss": "weighted mean", "optimizer": "Adam"}': "same",
    '{"slices": 5, "fits": "compiled again", "loss": "pairs", "clip": "clipnorm", "model": "shared"}': "same",
    '{"recompute": "segments", "watch": "telemetry", "model": "batch norm", "data": "PyDataset"}': "same",
    '{"steps": 2, "validation": "split", "batch": 12, "weights": "by row", "loss": "weighted mean"}': "same",
    '{"watch": "wrap", "steps": 2, "optimizer": "Adam", "model": "embedding"}': "by design",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", SHORT)
def test_ends_where_one_device_ends(case):
    found = outside(case, seconds=120)
    assert found["kind"] == SHORT[case], found["said"] or found["about"]


def test_a_number_is_a_case():
    cases = [drawn(number) for number in range(200)]
    assert cases == [drawn(number) for number in range(200)]
    assert all(read(written(case)) == case == settled(case) for case in cases)
    for name, values in AXES.items():
        assert {case[name] for case in cases} == set(values), name


def test_what_is_in_no_case_is_refused():
    with pytest.raises(ValueError, match="'slices': 4"):
        read('{"slices": 4}')


def test_a_finding_is_shrunk_to_what_it_takes():
    def run(case):
        shows = case["clip"] != "none" and case["steps"] > 1
        return {"kind": "DIFFERS" if shows else "same", "about": ""}

    case = next(case for case in map(drawn, range(1000)) if run(case)["kind"] == "DIFFERS" and len(brief(case)) > 12)
    smallest, _ = shrunk(case, run(case), run, tries=200)
    assert set(brief(smallest)) == {"clip", "steps"}
    assert all(run(one)["kind"] == "same" for one in simpler(smallest))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.says[:40])
def test_a_page_says_what_differs_by_design(rule):
    text = " ".join((DOCS / rule.page).read_text().split())
    assert rule.says in text
    cases = [drawn(number) for number in range(2000)]
    assert 0 < sum(rule in applying(case) for case in cases) < len(cases) / 4
