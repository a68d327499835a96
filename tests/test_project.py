"""What the project's files say of each other holds: releases, workflows, issue forms and the citation."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from runner import tiers

import keras_paragrad
from keras_paragrad.compat.check import KNOWN_TO_WORK

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
sys.path.insert(0, str(ROOT / "benchmarks"))
import releases

GITHUB = ROOT / ".github"
SCRIPTS = [path for folder in ("benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def constraints(path: Path, releases: str) -> str:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, path)
    (path / ".venv").mkdir(exist_ok=True)
    (path / ".venv" / ".created").touch()
    subprocess.run(["make", "-s", ".venv/.constraints", f"RELEASES={releases}"], cwd=path, check=True, timeout=60)
    return (path / ".venv" / ".constraints").read_text()


def test_every_module_of_tests_has_a_test():
    """A merge or a script that empties a module would not be seen, as nothing in it fails."""
    modules = sorted(Path(__file__).parent.rglob("test_*.py"))
    assert len(modules) > 100
    assert [path.name for path in modules if not re.search(r"^(async )?def test_", path.read_text(), re.M)] == []


def test_make_installs_the_releases_that_are_asked_for(tmp_path):
    pinned = (ROOT / "constraints.txt").read_text()
    assert constraints(tmp_path, "pinned") == pinned
    newest = constraints(tmp_path, "newest").splitlines()
    assert {line.partition("==")[0] for line in newest} == {"pyright", "ruff"}


@pytest.mark.parametrize("pair", releases.PAIRS)
def test_make_installs_the_pair_that_is_asked_for(tmp_path, pair):
    """The same as for `make compat`, and the linters that are pinned."""
    found = constraints(tmp_path, pair).splitlines()
    # Of pre-releases, TensorFlow's alone is bounded.
    bounded = [each for each in releases.PAIRS[pair] if each != "keras"]
    assert [line for line in found if not line.startswith(("pyright==", "ruff=="))] == bounded
    assert len(found) == len(bounded) + 2


def test_the_oldest_pair_is_what_the_project_allows():
    keras, tensorflow = next(iter(releases.PAIRS)).split("-")
    bounds = {re.match(r"[\w-]+", each)[0]: each for each in PROJECT["dependencies"]}
    assert f">={keras}," in bounds["keras"] and f">={tensorflow}," in bounds["tensorflow"]
    assert f"keras {keras} with tensorflow {tensorflow}," in KNOWN_TO_WORK


def test_what_is_installed_already_is_not_installed_again(tmp_path):
    constraints(tmp_path, "3.10-2.19")
    written = (tmp_path / ".venv" / ".constraints").stat().st_mtime_ns
    constraints(tmp_path, "3.10-2.19")
    assert (tmp_path / ".venv" / ".constraints").stat().st_mtime_ns == written


def commands(folder, **scripts):
    """A folder for the path, with commands of these scripts and those that make's recipes need, and no others."""
    folder.mkdir()
    for name in ("sh", "make", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name))
    for name, script in scripts.items():
        (folder / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name.replace("_", "-")).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("user", "sudo", "fetched"),
    [(0, None, True), (1000, 'shift; "$@"', True), (1000, "exit 1", False), (1000, None, False)],
    ids=["root", "sudo", "sudo that asks for a password", "no sudo"],
)
def test_make_gets_a_browser_where_it_may(tmp_path, user, sudo, fetched):
    """Commands stand in for apt-get and sudo: what they are asked for is written down, and Chromium is there then."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    path, asked = tmp_path / "bin", tmp_path / "asked.txt"
    install = (
        f'echo "$*" >> {asked}\nfor name in chromium chromedriver; do echo > {path}/$name; chmod +x {path}/$name; done'
    )
    commands(path, id=f"echo {user}", true="exit 0", apt_get=install, **({"sudo": sudo} if sudo else {}))

    def make():
        return subprocess.run(
            ["make", "-s", "browser"], cwd=tmp_path, env={"PATH": str(path)}, capture_output=True, text=True, check=True
        ).stdout

    said = make()
    assert ("To be left out" in said) == (not fetched)
    if not fetched:
        assert not asked.exists()
        assert "sudo apt-get install chromium chromium-driver fonts-dejavu-core" in said
        return
    packages = "install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core"
    assert asked.read_text().splitlines() == ["update", packages]
    # What is there is not fetched again.
    assert make() == ""
    assert len(asked.read_text().splitlines()) == 2


def test_tests_that_need_a_browser_are_left_out_and_counted(tmp_path):
    """With the fixtures of such tests, and without those of all tests, which import TensorFlow."""
    (tmp_path / "runner").mkdir()
    shutil.copy(ROOT / "tests" / "runner" / "left_out.py", tmp_path / "runner")
    shutil.copy(ROOT / "tests" / "profiling" / "browser" / "conftest.py", tmp_path / "conftest.py")
    reporting = "def pytest_terminal_summary(terminalreporter):\n    left_out.report(terminalreporter)\n"
    (tmp_path / "summary.py").write_text(f"from runner import left_out\n\n{reporting}")
    tests = (f"def test_{name}({fixture}): pass\n" for name, fixture in (("a", "browser"), ("b", "browser"), ("c", "")))
    (tmp_path / "test_page.py").write_text("".join(tests))
    counted = tmp_path / "left_out.txt"
    environment = {"PATH": str(commands(tmp_path / "bin")), "LEFT_OUT": str(counted), "PYTHONPATH": str(tmp_path)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "summary", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 passed, 2 skipped" in ran.stdout, ran.stdout + ran.stderr
    (line,) = counted.read_text().splitlines()
    assert line.startswith("Left out: 2 tests: needs Chromium and its driver on the path: sudo apt-get install")
    assert line in ran.stdout


def test_an_unknown_choice_of_releases_is_named():
    made = subprocess.run(["make", "-n", "RELEASES=old"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode
    assert "RELEASES is pinned, newest, pre or one of 3.10-2.19 3.12-2.20 3.15-2.21, not old" in made.stderr


@pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")
def test_the_workflow_runs_what_there_is():
    workflow = (GITHUB / "workflows" / "tests.yml").read_text()
    pythons = re.search(r"python: \[(.*)\]", workflow).group(1)
    supported = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.", each)]
    # TensorFlow has no release yet for the last of them.
    assert [
        *re.findall(r'"([\d.]+)"', pythons),
        *re.findall(r'python: "([\d.]+)", releases: pre', workflow),
    ] == supported
    tested = re.findall(r"releases: \[(.*)\]", workflow)[0].split(", ") + re.findall(r"releases: (\w+)\}", workflow)
    assert sorted(tested) == ["newest", "pinned", "pinned", "pre"]
    every_change, every_week = (json.loads(each) for each in re.findall(r"'(\[.*?\])'", workflow))
    assert every_change == [next(iter(releases.PAIRS))] and every_week == [*releases.PAIRS]
    commands = re.findall(r"command: ([\w-]+)", workflow) + re.findall(r"run: make ([a-z-]+)", workflow)
    for command in commands:
        assert re.search(rf"^{command}:", MAKEFILE, flags=re.MULTILINE), command


@pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")
@pytest.mark.parametrize("name", ["tests", "release"])
def test_actions_are_githubs_own_and_pinned(name):
    workflow = (GITHUB / "workflows" / f"{name}.yml").read_text()
    used = re.findall(r"uses: (.*)", workflow)
    assert used
    for each in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v[\d.]+", each), each
    for command in re.findall(r"run: make ([a-z -]+?)(?: [A-Z]+=|\n)", workflow):
        for target in command.split():
            assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


@pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")
def test_pre_commit_runs_the_linters_of_make():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (pinned,) = re.findall(r"^ruff==.*", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert re.findall(r"additional_dependencies: \[(.*)\]", hooks) == [pinned, pinned]
    for entry in re.findall(r"entry: (.*) --force-exclude", hooks):
        assert f"$(BIN)/{entry} ." in MAKEFILE


@pytest.mark.parametrize("machines", [1, 3])
def test_machines_share_the_tests_and_leave_none_out(machines):
    class Item(NamedTuple):
        nodeid: str

    folder = ROOT / "tests"
    everything = [Item(f"tests/{path.relative_to(folder).as_posix()}::test") for path in folder.rglob("test_*.py")]
    recorded = json.loads((ROOT / "tests" / "durations.json").read_text())
    parts = []
    for number in range(1, machines + 1):
        items = list(everything)
        tiers.keep_part(items, f"{number}/{machines}")
        parts.append(items)
    assert sorted(item.nodeid for part in parts for item in part) == sorted(item.nodeid for item in everything)
    seconds = [
        sum(recorded.get(item.nodeid.partition("::")[0].removeprefix("tests/"), 0) for item in part) for part in parts
    ]
    assert max(seconds) < 1.1 * min(seconds)


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{keras_paragrad.__version__}"' in citation
    assert f"license: {PROJECT['license']}" in citation


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_of_the_package_is_there(script):
    """Few of them run in the tests, and some import only in a process of their own."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        if node.module and node.module.partition(".")[0] == "keras_paragrad":
            module = importlib.import_module(node.module)
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not missing, f"{node.module} has no {missing}"
