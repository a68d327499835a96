"""A plan reads as a table, the same wherever it is printed, and as data."""

import io

import pytest
from rich.console import Console
from sample_models.machines import describe

from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import Explanation, make_plan, value_in_words
from keras_paragrad.plain_text import WIDTH

pytestmark = pytest.mark.fast

MACHINE = describe(gpus=4, compute_capability=(9, 0), gpu_memory_gb=80, workers=2)


@pytest.fixture
def explanation():
    return Explanation(make_plan(MACHINE, Options()), MACHINE)


def words(text):
    return " ".join("".join(letter if letter.isascii() else " " for letter in text).split())


def test_all_of_the_plan_is_in_it(explanation):
    console = Console(file=io.StringIO(), width=400)
    console.print(explanation)
    text = words(console.file.getvalue())
    for decision in explanation.plan:
        for part in (decision.name, decision.reason, decision.override):
            assert words(part) in text, part
        assert value_in_words(decision.value) in text
    assert text.startswith("Found: 1 CPU, 4 GPUs in this process")


@pytest.mark.parametrize(
    ("machine", "options", "plan", "step", "command"),
    [
        ({"cpus": 8}, {}, "no strategy, 1 replica on CPU:0", "not compiled by XLA, float32, exact", "python train.py"),
        (
            {"gpus": 4, "compute_capability": (9, 0), "workers": 2},
            {},
            "multi_worker, 8 replicas on GPU:0 to GPU:3 of each of 2 workers, all-reduce by nccl",
            "compiled by XLA on each replica, float32, each batch divided among the replicas, exact",
            "keras-paragrad launch train.py, in each task",
        ),
        (
            {"workers": 2, "ps": 1},
            {"exact": False},
            "parameter_server, ",
            "not compiled by XLA, float32",
            "keras-paragrad launch train.py, in each task",
        ),
    ],
    ids=["CPU", "workers", "servers"],
)
def test_it_begins_with_a_summary_and_the_command(machine, options, plan, step, command):
    there = describe(**machine)
    lines = str(Explanation(make_plan(there, Options(**options)), there)).splitlines()
    heads = [line.partition(": ")[0] for line in lines[:4]]
    assert heads == ["Found", "Plan", "Step", "To start it"]
    for line, start in zip(lines[1:4], (plan, step, command), strict=True):
        assert line.partition(": ")[2].startswith(start)


@pytest.mark.parametrize("columns", ["20", "300"])
def test_the_text_is_the_same_everywhere(explanation, columns, monkeypatch):
    before = str(explanation)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(explanation) == before
    assert "\x1b" not in before
    assert max(len(line) for line in before.splitlines()) <= WIDTH
    assert all(decision.name in before for decision in explanation.plan)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((), "-"),
        (("CPU:0",), "CPU:0"),
        (("CPU:0", "CPU:1"), "CPU:0 CPU:1"),
        (("GPU:0", "GPU:1", "GPU:2"), "GPU:0 ... GPU:2"),
        (True, "True"),
        (0, "0"),
        ("ring", "ring"),
    ],
    ids=str,
)
def test_values(value, expected):
    assert value_in_words(value) == expected
