"""Steps that are sent: so many at a time, taken again where a worker dies, and failing with the reason."""

import functools
import threading

import pytest
import tensorflow as tf

from keras_paragrad.distribution.servers.preparation import Dispatcher

pytestmark = pytest.mark.fast


class Remote:
    """What a step returns on its worker, which it may die with."""

    def __init__(self, value, failures=0, ready=None):
        self.value, self.failures, self.ready = value, failures, ready

    def fetch(self):
        if self.ready:
            self.ready.wait(20)
        if self.failures:
            self.failures -= 1
            raise tf.errors.UnavailableError(None, None, "1 root error(s) found.\n (0) ABORTED: {{node x}} it is gone")
        return self.value


class Coordinator:
    def __init__(self):
        self.joined = 0

    def schedule(self, step, args):
        return step(*args)

    def join(self):
        self.joined += 1


def test_a_result_that_died_with_its_worker_is_fetched_when_the_step_was_taken_again():
    coordinator, arrived = Coordinator(), []
    dispatcher = Dispatcher(coordinator, workers=1)
    dispatcher.send(lambda value: Remote(value, failures=1), 3, arrived.append)
    dispatcher.send(Remote, 4, arrived.append)
    dispatcher.join()
    assert sorted(arrived) == [3, 4]
    assert coordinator.joined >= 2


def test_one_that_stays_lost_is_said_and_forgotten():
    dispatcher, arrived = Dispatcher(Coordinator(), workers=1), []
    future = dispatcher.send(lambda value: Remote(value, failures=9), 3, arrived.append)
    with pytest.raises(RuntimeError, match="cancelled. UnavailableError: it is gone$"):
        dispatcher.join()
    assert future.done() and arrived == []
    dispatcher.send(Remote, 4, arrived.append)
    dispatcher.join()
    assert arrived == [4]


def test_the_cause_goes_before_what_was_cancelled_for_it():
    dispatcher = Dispatcher(Coordinator(), workers=2)

    ready = threading.Event()

    class Cancelled(Remote):
        def fetch(self):
            self.ready.wait(20)
            raise tf.errors.CancelledError(None, None, "it was cancelled")

    for kind in (Cancelled, functools.partial(Remote, failures=9), Cancelled):
        dispatcher.send(functools.partial(kind, ready=ready), 1, lambda value: value)
    ready.set()
    with pytest.raises(RuntimeError, match="it is gone"):
        dispatcher.join()


def test_no_more_are_sent_than_may_be_in_flight():
    dispatcher, ready, scheduled = Dispatcher(Coordinator(), workers=2), threading.Event(), []

    def step(value):
        scheduled.append(value)
        return Remote(value, ready=ready)

    def send_all():
        for value in range(6):
            dispatcher.send(step, value, lambda arrived: arrived)

    sender = threading.Thread(target=send_all)
    sender.start()
    sender.join(0.5)
    assert sender.is_alive() and scheduled == [0, 1, 2, 3]
    ready.set()
    sender.join(20)
    dispatcher.join()
    assert scheduled == [*range(6)]
