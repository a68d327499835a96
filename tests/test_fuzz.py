"""The short form of `make fuzz`: each way to train with all that makes it hard, and the fuzzer's own parts."""

from pathlib import Path

import pytest
from fuzz.cases import AXES, HARD, WAYS, brief, drawn, in_every_way, read, settled, simpler, written
from fuzz.outcomes import outside, together
from fuzz.rules import RULES, applying
from fuzz.run import shrunk

DOCS = Path(__file__).parents[1] / "docs"

# What is refused, by what makes it hard.
REFUSED = {
    "an own step": ("windows and slices in shards",),
    "states": ("windows", "windows on replicas", "windows and slices in shards"),
}
# Other cases, with components that watch or change gradients.
OTHERS = {
    '{"devices": "mesh of columns", "steps": 2, "step": "guide"}': "by design",
    '{"devices": "replicas", "transform": "scaled", "rows": 31, "model": "two inputs", "decay": 0.02}': "same",
    '{"recompute": "segments", "watch": "telemetry", "model": "batch norm", "data": "PyDataset"}': "same",
    '{"steps": 2, "validation": "split", "batch": 12, "weights": "by row", "loss": "weighted mean"}': "same",
    '{"watch": "wrap", "steps": 2, "optimizer": "Adam", "model": "embedding"}': "by design",
}


@pytest.mark.few(4)
@pytest.mark.parametrize("hard", HARD)
def test_every_way_ends_where_one_device_ends(hard):
    ways = in_every_way(HARD[hard])
    outcomes = together([written(case) for case in ways.values()], seconds=60 + 40 * len(ways))
    for way, found in zip(ways, outcomes, strict=True):
        refused = way in REFUSED.get(hard, ())
        assert (found["kind"] == "refused") == refused, (way, found)
        assert found["kind"] in ("same", "by design", "refused"), (way, found)
        assert refused or found["apart"] < 1e-6, (way, found)


def test_every_way_meets_what_makes_it_hard():
    met = {(way, hard) for hard in HARD for way in in_every_way(HARD[hard])}
    # Meshes and pipelines have no slices, nor pipelines steps of a model's own.
    assert {(way, hard) for way in WAYS for hard in HARD} - met == {("pipeline", "an own step")}


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS)
def test_ends_where_one_device_ends(case):
    found = outside(case, seconds=120)
    assert found["kind"] == OTHERS[case], found["said"] or found["about"]


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
