"""SIGTERM reaches who handled it before, however many have listened since and in whatever order they left."""

import signal

import pytest

from keras_paragrad.distribution.checkpoint.stopping import StopRequest


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
    first.leave()
    # Puts the first one's handler back.
    second.leave()
    signal.raise_signal(signal.SIGTERM)
    assert called == [signal.SIGTERM]
    assert not first.received and not second.received
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_left_hands_on_what_another_is_called_with(called):
    first, second = StopRequest(), StopRequest()
    first.listen()
    second.listen()
    first.leave()
    signal.raise_signal(signal.SIGTERM)
    assert second.received and not first.received and called == [signal.SIGTERM]
    second.leave()
