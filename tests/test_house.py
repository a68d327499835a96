"""Imports run downward, and a class name means one thing."""

import ast
import functools
import graphlib
from collections import Counter
from pathlib import Path

import pytest

import keras_paragrad

pytestmark = pytest.mark.fast

PACKAGE = Path(keras_paragrad.__file__).parent
SHARED = {"arguments", "exports", "extras", "flops", "pages", "plain_text", "sums"}
SEAM = {"compat", "engine", "storage"}
# What each component imports from others, beside the seam and what all share.
BELOW = {
    "compat": set(),
    "storage": {"compat"},
    "engine": {"compat", "storage"},
    "accumulation": {"memory"},
    "per_example": set(),
    "inputs": {"memory", "per_example"},
    "privacy": {"accumulation", "per_example"},
    "memory": {"per_example"},
    "distribution": {"accumulation", "memory"},
    "profiling": {"distribution", "accumulation"},
    "cli": {"distribution", "profiling", "memory"},
}
# How many lines each folder may have, and the modules beside them. What adds to one takes from another: their sum is
# `TOTAL`, which is only lowered. A folder that has 25 fewer than its number gets a lower one.
LINES = {
    "accumulation": 1286,
    "cli": 732,
    "compat": 2976,
    "distribution": 9661,
    "engine": 11055,
    "inputs": 1379,
    "memory": 2995,
    "per_example": 5012,
    "privacy": 3120,
    "profiling": 4492,
    "storage": 2730,
    "top": 1108,
}
TOTAL, SLACK = 46546, 25
SOURCES = {
    ".".join(("keras_paragrad", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


# Each process that runs tests imports this module, and one of them needs what it parses.
@functools.cache
def trees():
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imported(name):
    """The modules of ours that a module names in an import, at its top or later."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_folders_have_no_more_lines_than_their_numbers():
    found = Counter()
    for path in SOURCES.values():
        folder = path.relative_to(PACKAGE).parts[0]
        found["top" if folder == path.name else folder] += path.read_bytes().count(b"\n")
    off = {name: (found[name], LINES.get(name, 0)) for name in {*found, *LINES}}
    assert {name: pair for name, pair in off.items() if not pair[1] - SLACK < pair[0] <= pair[1]} == {}
    assert sum(LINES.values()) == TOTAL


@pytest.mark.parametrize("component", BELOW)
def test_imports_run_downward(component):
    inside = [name for name in SOURCES if name.split(".")[1:2] == [component]]
    assert inside
    others = {each.split(".")[1] for name in inside for each in imported(name) if each in SOURCES and "." in each}
    allowed = BELOW[component] | {component} | (set() if component in SEAM else SHARED | SEAM)
    assert others <= allowed


# In accumulation, the optimizer makes a schedule that names its type.
@pytest.mark.parametrize("component", sorted(BELOW.keys() - {"accumulation"}))
def test_imports_within_a_component_run_one_way(component):
    graph = {}
    for name, tree in trees().items():
        if name.split(".")[1:2] == [component]:
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
            pairs = [(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
            graph[name] = {inner if inner in SOURCES else outer for outer, inner in pairs} - {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_imports_between_the_engines_folders_run_one_way():
    graph = {}
    for name in SOURCES:
        if name.startswith("keras_paragrad.engine.") and name.count(".") > 2:
            folder = name.split(".")[2]
            others = {each.split(".")[2] for each in imported(name) if each.startswith("keras_paragrad.engine.")}
            graph.setdefault(folder, set()).update(others - {folder})
    assert len(graph) > 10
    graphlib.TopologicalSorter(graph).prepare()


def _is_command(module):
    """Whether a module is a command, whose functions `add_arguments` and `run`, or `main`, the caller finds by name."""
    return module.split(".")[1:2] == ["cli"] or any(
        isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in trees()[module].body
    )


def test_no_name_means_two_things():
    names = Counter(
        node.name
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if not (_is_command(module) and node.name in {"add_arguments", "run", "main"})
    )
    assert [name for name, count in names.items() if count > 1] == []


def _sets_apply(node):
    """Whether a node gives an object or a class another `apply`."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        named = any(isinstance(each, ast.Constant) and each.value == "apply" for each in node.args)
        named = named or any(each.arg == "apply" for each in node.keywords)
        return named and called in {"Replacement", "setattr", "__setattr__", "replace", "replace_methods", "update"}
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    names = [getattr(each, "attr", None) for each in targets if getattr(getattr(each, "value", 0), "id", 0) != "self"]
    names += [getattr(getattr(each, "slice", None), "value", None) for each in targets]
    return isinstance(node, ast.Assign | ast.AnnAssign) and "apply" in names


def test_apply_of_optimizers_is_replaced_in_one_place():
    sites = {name for name, tree in trees().items() for node in ast.walk(tree) if _sets_apply(node)}
    assert sites == {"keras_paragrad.engine.step.interception"}


def test_the_engine_asks_no_component_for_its_name():
    """What divides batches is a `Divider`, which the component hands over."""
    components = set(keras_paragrad.__all__)
    for name, tree in trees().items():
        if name.split(".")[1:2] == ["engine"]:
            nodes = list(ast.walk(tree))
            strings = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            named = {getattr(each, field, None) for each in nodes for field in ("arg", "attr", "id")}
            assert not strings & components and "asked_by" not in named, name


def test_rows_are_made_up_only_before_there_are_any():
    """What trains is proved on real rows; made-up ones build layers, and refuse layers and losses before data."""
    made_up = "keras_paragrad.engine.trials.trial.synthetic_rows"
    users = {name.split(".", 1)[1] for name in SOURCES if made_up in imported(name)}
    before_data = {
        "per_example.mixing_layers",
        "per_example.units",
        "per_example.proof",
        "privacy.clipping",
    }
    assert users == before_data | {"engine.step.building"}
