"""Keras's own tests of training, callbacks, models and saving, with a component of ours under every model."""

from pathlib import Path

import keras
import pytest
from keras_suite.expected import COMPONENTS, REASONS, SAMPLE
from own_process import run_pytest

SITE = Path(keras.__file__).parent.parent
DOCS = Path(__file__).parents[2] / "docs"


def run(component, tests, fails, monkeypatch, seconds):
    monkeypatch.setenv("UNDER_EVERY_MODEL", component)
    monkeypatch.setenv("UNDER_EVERY_MODEL_FAILS", str(fails))
    plugins = ["-p", "keras_suite.under_every_model", "-p", "no:cacheprovider"]
    nodes = [str(SITE / test) for test in tests]
    run_pytest(["-q", "-W", "ignore", "-c", "/dev/null", "--rootdir", str(SITE), *plugins, *nodes], seconds)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_sample(component, monkeypatch, tmp_path):
    run(component, SAMPLE, tmp_path / "fails", monkeypatch, seconds=240)


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason.docs], ids=lambda reason: reason.what)
def test_the_docs_give_the_reason(reason):
    page, words = reason.docs
    assert words in " ".join((DOCS / page).read_text().split())
