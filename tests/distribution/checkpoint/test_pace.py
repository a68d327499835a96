"""Workers ask each other about once a second, whatever a step takes."""

import numpy as np
import pytest

from keras_paragrad.distribution.checkpoint import pace


class Workers:
    """Two workers and a clock, of which this one is the chief."""

    def __init__(self, monkeypatch):
        self.now, self.asked, self.other = 0.0, [], 0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(pace, "gather", self.gather)

    def gather(self, strategy, values):
        self.asked.append(self.now)
        return np.array([values, [self.other, 10**6]])


@pytest.mark.parametrize("seconds", [0.0001, 0.003, 0.2, 5.0], ids=str)
def test_about_every_second(monkeypatch, seconds):
    workers = Workers(monkeypatch)
    checks = pace.StopChecks(None, 2, None)
    for step in range(100_000):
        # The first is compiled.
        workers.now += 20 if step == 0 else seconds
        assert not checks.after_step(False)
        if workers.now > 100:
            break
    between = np.diff([time for time in workers.asked if time > min(50, workers.now / 2)])
    assert (between < max(1.2, 1.2 * seconds)).all()
    assert len(workers.asked) < 120


def test_a_fixed_number_of_steps(monkeypatch):
    workers = Workers(monkeypatch)
    checks = pace.StopChecks(None, 2, 3)
    found = []
    for step in range(7):
        workers.other = step >= 3
        found.append(checks.after_step(False))
    assert found == [False] * 5 + [True, False]


def test_one_worker_asks_nobody(monkeypatch):
    workers = Workers(monkeypatch)
    checks = pace.StopChecks(None, 1, None)
    assert [checks.after_step(received) for received in (False, True)] == [False, True]
    assert checks.ask(True)
    assert workers.asked == []
