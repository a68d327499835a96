"""Optional packages: one error and one command for all of them, and it installs what is missing."""

import importlib.metadata
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from keras_paragrad.extras import EXTRAS, MissingExtraError, explain_missing, require
from keras_paragrad.profiling.analysis.trace import read_trace

pytestmark = pytest.mark.fast

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("xprof", lambda path: read_trace(path / "made.xplane.pb")),
    ],
)
def test_a_missing_package_raises_one_error_with_its_command(package, use, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtraError, match=rf"needs {package}, which is not installed\. Run pip install "
    ) as raised:
        use(tmp_path)
    assert raised.value.name == package
    command = re.split(r", or|\.(?: |$)", str(raised.value).partition("Run ")[2])[0]
    assert shlex.split(command) == ["pip", "install", "keras_paragrad[profile]"]
    assert "['" not in command and "'keras_paragrad[profile]'" in command


def test_each_package_comes_with_its_extra():
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    distributions = importlib.metadata.packages_distributions()
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            continue
        named = set(map(_name, extras[extra]))
        assert {_name(line) for line in distributions[package]} & named, f"{package} does not come with {extra}"


def test_tests_run_with_every_extra():
    """So that none is skipped for a missing package in `make test`."""
    extras = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    found, left = set(), ["dev"]
    while left:
        extra = left.pop()
        found.add(extra)
        own = [re.fullmatch(r"keras_paragrad\[(.*)\]", line) for line in extras[extra]]
        left += [name for each in own if each for name in each[1].split(",")]
    assert found == set(extras)


def test_several_are_named_together():
    assert explain_missing("Profiler", ["xprof (to read a trace)", "ray"]) == (
        "Profiler needs xprof (to read a trace) and ray, which are not installed. Run pip install "
        "'keras_paragrad[profile,ray]'. tensorboard-plugin-profile>=2.20.7 brings xprof as well."
    )
    require("Nothing", "sys")


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def test_either_name_of_the_profile_plugin_will_do():
    """TensorBoard's plugin of that release is a package without modules, which requires xprof."""
    assert explain_missing("Reading a trace", ["xprof"]).endswith(
        "Run pip install 'keras_paragrad[profile]'. tensorboard-plugin-profile>=2.20.7 brings xprof as well."
    )
