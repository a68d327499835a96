"""What the start of `fit` says of itself while it takes long: a line that disappears, a log line, or nothing."""

import io
import logging
import sys
import threading
import time

import keras
import numpy as np
import pytest

from keras_paragrad import DistributedFit, ExactAccumulation, microbatch, wrap
from keras_paragrad.accumulation import AccumulatingOptimizer
from keras_paragrad.engine.tracing import announcing as module
from keras_paragrad.engine.tracing.announcing import announcing, announcing_part

pytestmark = pytest.mark.fast


class Terminal(io.StringIO):
    def isatty(self):
        return True


class OfNotebook(io.StringIO):
    """As a notebook's stdout."""


OfNotebook.__module__ = "ipykernel.iostream"


@pytest.fixture
def soon(monkeypatch):
    """Everything takes long."""
    monkeypatch.setattr(module, "DELAY", 0.0)
    monkeypatch.setattr(module, "INTERVAL", 0.002)


@pytest.fixture
def to_terminal(monkeypatch, soon):
    """Makes stderr a terminal; called in a test, as pytest replaces stderr before that."""

    def replace():
        monkeypatch.setattr(sys, "stderr", stream := Terminal())
        return stream

    return replace


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def screen(written):
    """What a terminal shows in the end of lines that are overwritten."""
    line, column = [], 0
    for character in written:
        if character == "\r":
            column = 0
        else:
            line[column : column + 1] = character
            column += 1
    return "".join(line)


def writers():
    return [each for each in threading.enumerate() if each.name == "keras_paragrad announcing"]


def test_a_line_says_the_phase_and_disappears(to_terminal, monkeypatch):
    terminal = to_terminal()
    monkeypatch.setenv("COLUMNS", "40")
    with announcing("building a model of a hundred layers", verbose=1):
        wait_for(lambda: "building" in screen(terminal.getvalue()))
        with announcing_part("tracing it"):
            wait_for(lambda: screen(terminal.getvalue()).rstrip() == "keras_paragrad: tracing it (0 s so far)")
            with announcing("compiling it", verbose=0):
                wait_for(lambda: "compiling" in screen(terminal.getvalue()))
        wait_for(lambda: "building" in screen(terminal.getvalue()))
        assert len(screen(terminal.getvalue())) == 39
    assert screen(terminal.getvalue()).strip() == ""
    assert terminal.getvalue().endswith("\r") and "\n" not in terminal.getvalue()
    assert not writers()


def test_a_notebook_has_the_line_where_its_progress_bar_is(monkeypatch, soon):
    monkeypatch.setattr(sys, "stdout", OfNotebook())
    with announcing("building", verbose=1):
        wait_for(lambda: "building (0 s" in sys.stdout.getvalue())
    assert screen(sys.stdout.getvalue()).strip() == ""


def test_without_a_terminal_each_phase_is_logged_once(caplog, soon):
    caplog.set_level(logging.INFO, "keras_paragrad")
    with announcing("building", verbose=1):
        wait_for(lambda: len(caplog.messages) == 1)
        with announcing_part("tracing"):
            wait_for(lambda: len(caplog.messages) == 2)
        time.sleep(0.05)
    assert caplog.messages == ["building (0 s so far)", "tracing (0 s so far)"]


@pytest.mark.parametrize("verbose", [0, None], ids=["verbose=0", "outside of fit"])
def test_nothing_is_said_to_who_wants_nothing(to_terminal, verbose):
    terminal = to_terminal()
    with announcing("building", verbose=verbose):
        assert not writers()
        with announcing_part("tracing"):
            time.sleep(0.02)
    assert terminal.getvalue() == ""


def test_what_is_quick_says_nothing(to_terminal, monkeypatch):
    terminal = to_terminal()
    monkeypatch.setattr(module, "DELAY", 60.0)
    with announcing("building", verbose=1):
        assert writers()
    assert terminal.getvalue() == "" and not writers()


def test_a_failure_leaves_no_thread_and_no_line(to_terminal):
    terminal = to_terminal()
    with pytest.raises(ValueError, match="stop"), announcing("building", verbose=1):
        wait_for(terminal.getvalue)
        raise ValueError("stop")
    assert screen(terminal.getvalue()).strip() == "" and not writers()


def test_a_closed_terminal_is_no_failure(to_terminal):
    terminal = to_terminal()
    with announcing("building", verbose=1):
        wait_for(terminal.getvalue)
        terminal.close()
        wait_for(lambda: not writers())


def compiled(optimizer="sgd", wrapped=False):
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    if wrapped:
        model = wrap(model)
    model.compile(optimizer, loss=lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred), axis=-1))
    return model


def fit_slices(data, verbose):
    with microbatch(model := compiled(), 4):
        model.fit(*data, batch_size=8, verbose=verbose)


def fit_windows(data, verbose):
    compiled(AccumulatingOptimizer("sgd", 2)).fit(*data, batch_size=4, verbose=verbose, callbacks=[ExactAccumulation()])


def fit_distributed(data, verbose):
    dist = DistributedFit()
    with dist.scope():
        model = compiled()
    dist.fit(model, *data, batch_size=8, verbose=verbose)


def fit_wrapped(data, verbose):
    compiled(wrapped=True).fit(*data, batch_size=8, verbose=verbose)


STEP = {"tracing, compiling, running", "tracing the step"}


@pytest.mark.few(0, "fit_slices-phases0", "fit_distributed-phases2")
@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("fit", "phases"),
    [
        (fit_slices, STEP | {"proving on the first batch", "finding how batches are divided"}),
        (fit_windows, STEP | {"proving on the first batch", "finding how batches are divided"}),
        (fit_distributed, {"preparing the training", "tracing, compiling, running"}),
        (fit_wrapped, {"tracing the gradients of single examples"}),
    ],
)
def test_every_component_says_what_its_fit_is_busy_with(monkeypatch, fit, phases):
    entered = []

    class Line(module._Line):
        def __init__(self, phase):
            super().__init__(phase)
            entered.append(phase)

        def within(self, phase):
            entered.append(phase)
            return super().within(phase)

    monkeypatch.setattr(module, "_Line", Line)
    rows = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    fit((rows, rows[:, :1]), 2)
    assert all(any(each.startswith(phase) for each in entered) for phase in phases), entered
    # Not for each step.
    assert len([each for each in entered if each.startswith("tracing, compiling")]) <= 1
    entered.clear()
    fit((rows, rows[:, :1]), 0)
    assert entered == [] and not writers()
