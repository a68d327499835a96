"""What the project's files say of each other holds: releases, workflows, issue forms and the citation."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import keras_paragrad

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
GITHUB = ROOT / ".github"


def constraints(path: Path, releases: str) -> str:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, path)
    (path / ".venv").mkdir(exist_ok=True)
    (path / ".venv" / ".created").touch()
    subprocess.run(["make", "-s", ".venv/.constraints", f"RELEASES={releases}"], cwd=path, check=True, timeout=60)
    return (path / ".venv" / ".constraints").read_text()


def test_make_installs_the_releases_that_are_asked_for(tmp_path):
    pinned = (ROOT / "constraints.txt").read_text()
    assert constraints(tmp_path, "pinned") == pinned
    oldest = constraints(tmp_path, "oldest").splitlines()
    changed = set(oldest) - set(pinned.splitlines())
    assert len(oldest) == len(pinned.splitlines())
    # The oldest release of a range is the one that it begins with.
    for name in ("keras", "tensorflow"):
        (bound,) = (each for each in PROJECT["dependencies"] if re.match(rf"{name}\W", each))
        first = re.search(r">=([\d.]+)", bound).group(1)
        assert f"{name}=={first}.0" in oldest
    assert all(line.startswith(("keras==", "tensorflow==")) for line in changed)
    newest = constraints(tmp_path, "newest").splitlines()
    assert {line.partition("==")[0] for line in newest} == {"pyright", "ruff"}
    # Pre-releases of Keras and TensorFlow, and of nothing else.
    assert constraints(tmp_path, "pre").splitlines() == newest


def test_what_is_installed_already_is_not_installed_again(tmp_path):
    constraints(tmp_path, "oldest")
    written = (tmp_path / ".venv" / ".constraints").stat().st_mtime_ns
    constraints(tmp_path, "oldest")
    assert (tmp_path / ".venv" / ".constraints").stat().st_mtime_ns == written


def test_an_unknown_choice_of_releases_is_named():
    made = subprocess.run(["make", "-n", "RELEASES=old"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode
    assert "RELEASES is pinned, oldest, newest or pre, not old" in made.stderr


@pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")
def test_the_workflow_runs_what_there_is():
    workflow = (GITHUB / "workflows" / "tests.yml").read_text()
    pythons = re.search(r"python: \[(.*)\]", workflow).group(1)
    supported = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.", each)]
    assert re.findall(r'"([\d.]+)"', pythons) == supported
    assert {each.partition("@")[0] for each in re.findall(r"uses: (\S+)", workflow)} == {
        "actions/checkout",
        "actions/setup-python",
    }
    releases = re.findall(r"releases: \[(.*)\]", workflow)[0].split(", ") + re.findall(r"releases: (\w+)\}", workflow)
    assert sorted(releases) == ["newest", "oldest", "pinned", "pre"]
    commands = re.findall(r"command: ([\w-]+)", workflow) + re.findall(r"run: make ([a-z-]+)", workflow)
    for command in commands:
        assert re.search(rf"^{command}:", MAKEFILE, flags=re.MULTILINE), command


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{keras_paragrad.__version__}"' in citation
    assert f"license: {PROJECT['license']}" in citation
