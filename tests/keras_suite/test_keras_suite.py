"""Keras's own tests of training, callbacks, models and saving, with a component of ours under every model."""

from pathlib import Path

import keras
import pytest
from keras_suite.expected import COMPONENTS, REASONS, SAMPLE
from runner.own_process import run_pytest

SITE = Path(keras.__file__).parent.parent
SUITES = {
    # The other tests there compile no model.
    "trainers": ("trainer_test.py",),
    "callbacks": ("",),
    "models": ("",),
    "saving": ("",),
}
DOCS = Path(__file__).parents[2] / "docs"
shipped = pytest.mark.skipif(
    not (SITE / "keras/src/trainers/trainer_test.py").exists(), reason="this wheel of Keras has none of its tests"
)


def run(component, tests, fails, monkeypatch, seconds):
    monkeypatch.setenv("UNDER_EVERY_MODEL", component)
    monkeypatch.setenv("UNDER_EVERY_MODEL_FAILS", str(fails))
    # Other tracebacks parse sources, at which Python 3.11 may fail while the threads of replicas do the same.
    options = ["-q", "--tb=line", "-rf", "-W", "ignore", "-c", "/dev/null", "--rootdir", str(SITE)]
    plugins = ["-p", "keras_suite.under_every_model", "-p", "no:cacheprovider"]
    nodes = [str(SITE / test) for test in tests]
    run_pytest([*options, *plugins, *nodes], seconds)


# Two replicas are refused most.
@pytest.mark.long
@shipped
@pytest.mark.parametrize(
    "component", [pytest.param(each, marks=[pytest.mark.long] * (each != "two replicas")) for each in COMPONENTS]
)
def test_a_sample(component, monkeypatch, tmp_path):
    run(component, SAMPLE, tmp_path / "fails", monkeypatch, seconds=240)


@pytest.fixture(scope="module", params=SUITES)
def suite(request, tmp_path_factory):
    """A suite's name and files, and a file with the names of the tests that fail here with Keras alone."""
    fails = tmp_path_factory.mktemp("keras") / "fails"
    tests = [f"keras/src/{request.param}/{name}" for name in SUITES[request.param]]
    with pytest.MonkeyPatch.context() as patch:
        run("nothing", tests, fails, patch, seconds=1200)
    return request.param, tests, fails


@shipped
@pytest.mark.long
def test_a_whole_suite(suite, monkeypatch):
    _, tests, fails = suite
    for component in COMPONENTS:
        run(component, tests, fails, monkeypatch, seconds=3600)


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason.docs], ids=lambda reason: reason.what)
def test_the_docs_give_the_reason(reason):
    page, words = reason.docs
    assert words in " ".join((DOCS / page).read_text().split())
