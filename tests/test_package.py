"""What is tested is the installed wheel."""

import importlib.metadata
import re
from pathlib import Path

import keras_paragrad

DISTRIBUTION = importlib.metadata.distribution("keras_paragrad")


def test_the_package_is_the_installed_one():
    module = Path(keras_paragrad.__file__).resolve()
    installed = {Path(str(file.locate())).resolve() for file in DISTRIBUTION.files or ()}
    assert module in installed
    assert module.with_name("py.typed") in installed
    assert DISTRIBUTION.version == keras_paragrad.__version__


def test_the_wheel_brings_nothing_but_the_package():
    files = [file for file in DISTRIBUTION.files or () if file.name != "keras-paragrad"]  # the console script
    assert {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")} == {"keras_paragrad"}


def test_what_is_public_is_there():
    for name in keras_paragrad.__all__:
        assert getattr(keras_paragrad, name).__doc__


def test_the_page_on_a_package_index_has_no_links_that_lead_nowhere():
    page = DISTRIBUTION.metadata.get_payload()
    assert "`docs/index.md`" in page
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")]


def test_the_console_script():
    (script,) = (entry for entry in DISTRIBUTION.entry_points if entry.group == "console_scripts")
    assert script.name == "keras-paragrad"
    assert callable(script.load())
