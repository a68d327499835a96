"""What a session or a notebook shows of the objects that people look at."""

import html
import importlib
import inspect
import pkgutil

import keras
import pytest
from sample_models.machines import describe

import keras_paragrad
from keras_paragrad import DistributedFit, make_private
from keras_paragrad.distribution import Explanation, Options, make_plan
from keras_paragrad.memory import Estimate
from keras_paragrad.memory.breakdown import MemoryBreakdown
from keras_paragrad.memory.plan import MemoryPlan
from keras_paragrad.plain_text import InNotebooks, Printable
from keras_paragrad.privacy.budget import Privacy
from keras_paragrad.profiling.summary import OperationTime, ProfileSummary, StepTime
from keras_paragrad.profiling.tracer import WindowFigures

# A layer may have any name.
NAME = "<b>dense & co</b>"
MACHINE = describe(gpus=2)


def privacy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    given = {"clip_norm": 1.0, "expected_batch_size": 10, "delta": 1e-5, "noise_multiplier": 1.0, "examples": 100}
    return make_private(model, **given).privacy


def window():
    steps, longest = (StepTime(0, 0, 0.0, 2.0, compute=2.0),), (OperationTime("a", "MatMul", NAME, 1, 2.0, 1.0),)
    return WindowFigures(ProfileSummary(steps=steps, operations=longest), "logs")


SHOWN = {
    DistributedFit: (DistributedFit, "Plan: no strategy"),
    Estimate: (lambda: Estimate(NAME, 8, 1, 8, [MemoryBreakdown(None, *[1024] * 10, 4096)]), "Peak"),
    Explanation: (lambda: Explanation(make_plan(MACHINE, Options()), MACHINE), "To start it: python train.py"),
    MemoryPlan: (lambda: MemoryPlan(NAME, 8, 1, 4096), "4 KiB on each"),
    Privacy: (privacy, "differentially private"),
    WindowFigures: (window, "Profile of batches 0 to 0"),
}


def subclasses(cls):
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def test_all_that_is_printed_is_shown_in_notebooks():
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(keras_paragrad.__path__, "keras_paragrad.")
        if not each.name.endswith("__main__")
    ]
    classes = {each for module in modules for _, each in inspect.getmembers(module, inspect.isclass)}
    classes = {each for each in classes if each.__module__.startswith("keras_paragrad.")}
    printed = {each for each in classes if "__rich_console__" in vars(each)}
    assert all(issubclass(each, Printable) for each in printed)
    shown = {each for each in subclasses(InNotebooks) if each.__module__.startswith("keras_paragrad")}
    assert shown - {InNotebooks, Printable} == set(SHOWN)


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_what_is_shown(kind):
    make, says = SHOWN[kind]
    made = make()
    assert type(made) is kind
    assert says in repr(made)
    page = made._repr_html_()
    assert page.startswith("<pre") and page.endswith("</pre>")
    assert "<b>" not in page
    text = html.unescape(page[page.index(">") + 1 : -len("</pre>")])
    assert text == str(made)
    assert isinstance(made, Privacy) or repr(made) == text


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_a_notebook_shows_it_once(kind, monkeypatch):
    """Rich's consoles show what they print in a notebook, beside what `_repr_html_` returns."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    displayed = []
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: displayed.append(shown))
    make, says = SHOWN[kind]
    made = make()
    assert says in str(made)
    assert says in html.unescape(made._repr_html_())
    assert displayed == []
