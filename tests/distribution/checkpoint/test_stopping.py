"""SIGTERM reaches who handled it before, in whatever order listeners left; workers ask each other once a second."""

import signal

import numpy as np
import pytest

from keras_paragrad.distribution.checkpoint import interruptions
from keras_paragrad.distribution.checkpoint.interruptions import StopRequest

pytestmark = pytest.mark.fast


@pytest.fixture
def called():
    """The signals that the handler from before was called with."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_the_first_is_recorded_and_the_second_has_its_usual_effect(called):
    request = StopRequest()
    request.listen()
    handler = signal.getsignal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert request.received and called == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == handler
    signal.raise_signal(signal.SIGTERM)
    assert called == [signal.SIGTERM] * 2 and signal.getsignal(signal.SIGTERM) != handler


def test_two_that_leave_in_the_order_in_which_they_came(called):
    before = signal.getsignal(signal.SIGTERM)
    first, second = StopRequest(), StopRequest()
    first.listen()
    second.listen()
    first.restore()
    # Puts the first one's handler back.
    second.restore()
    signal.raise_signal(signal.SIGTERM)
    assert called == [signal.SIGTERM]
    assert not first.received and not second.received
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_left_hands_on_what_another_is_called_with(called):
    first, second = StopRequest(), StopRequest()
    first.listen()
    second.listen()
    first.restore()
    signal.raise_signal(signal.SIGTERM)
    assert second.received and not first.received and called == [signal.SIGTERM]
    second.restore()


class Workers:
    """Two workers and a clock, of which this one is the chief."""

    def __init__(self, monkeypatch):
        self.now, self.asked, self.other, self.written = 0.0, [], 0, 0
        monkeypatch.setattr(interruptions.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(interruptions, "gather", self.gather)

    def gather(self, strategy, values):
        self.asked.append(self.now)
        return np.array([values, [10**6, self.other, self.written]])


@pytest.mark.parametrize("seconds", [0.0001, 0.003, 0.2, 5.0], ids=str)
def test_about_every_second(monkeypatch, seconds):
    workers = Workers(monkeypatch)
    checks = interruptions.StopChecks(None, 2)
    for step in range(100_000):
        # The first is compiled.
        workers.now += 20 if step == 0 else seconds
        assert checks.after_step(False, True) == (False, False)
        if workers.now > 100:
            break
    between = np.diff([time for time in workers.asked if time > min(50, workers.now / 2)])
    assert (between < max(1.2, 1.2 * seconds)).all()
    assert len(workers.asked) < 120


def test_all_stop_if_one_does_and_are_done_if_all_are(monkeypatch):
    workers = Workers(monkeypatch)
    monkeypatch.setattr(interruptions, "SECONDS", 0.0)
    checks = interruptions.StopChecks(None, 2)
    found = []
    for step in range(3):
        workers.other, workers.written = step >= 2, step >= 1
        found.append(checks.after_step(False, True))
    assert found == [(False, False), (False, True), (True, True)]


def test_one_worker_asks_nobody(monkeypatch):
    workers = Workers(monkeypatch)
    checks = interruptions.StopChecks(None, 1)
    assert [checks.after_step(received, not received) for received in (False, True)] == [(False, True), (True, False)]
    assert checks.ask(True).stop
    assert workers.asked == []
