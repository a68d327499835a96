"""Sending steps to workers: so many at a time, and with a clear word if one fails."""

import contextlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import tensorflow as tf

STEPS_FOR_EACH_WORKER = 2
# What TensorFlow puts before a message for each function that it comes through.
_NODE = re.compile(r"\(\d+\) [A-Z_]+: |\{\{\w+ [^}]*\}\}")


class Dispatcher:
    """Has workers run steps, each of them the next one that waits.

    Args:
        coordinator: What schedules functions on the workers.
        workers: How many there are.
        in_flight: How many steps may wait or run at a time; two for each worker, unless given.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, workers: int, in_flight: int | None = None
    ):
        self._coordinator = coordinator
        self.in_flight = in_flight or STEPS_FOR_EACH_WORKER * workers
        self._free = threading.BoundedSemaphore(self.in_flight)
        self._receivers = ThreadPoolExecutor(self.in_flight, thread_name_prefix="keras_paragrad-receiver")
        self._pending: set[Future] = set()

    def send(self, step: Callable[[Any], Any], batch: Any, arrived: Callable[[Any], Any]) -> Future:
        """Runs a step on the next worker that is free; waits while too many have been sent.

        Args:
            step: A `tf.function`.
            batch: What it takes.
            arrived: Called with what it returns, as NumPy arrays, by a thread of its own.

        Returns:
            What becomes of it.

        Raises:
            RuntimeError: A step that was sent before has failed on its worker.
        """
        self._raise_failed()
        self._free.acquire()
        try:
            remote = self._coordinator.schedule(step, args=(batch,))
        except Exception as error:
            self._free.release()
            self._fail(error)
        future = self._receivers.submit(self._receive, remote, arrived)
        self._pending.add(future)
        return future

    def join(self) -> None:
        """Waits until what was sent has arrived.

        Raises:
            RuntimeError: A step has failed on its worker.
        """
        try:
            self._coordinator.join()
        except Exception as error:
            self._fail(error)
        wait(self._pending)
        self._raise_failed()

    def settle(self) -> None:
        """Waits until what was sent has arrived or failed, and raises nothing."""
        wait(self._pending)
        self._pending.clear()

    def _receive(self, remote: Any, arrived: Callable[[Any], Any]) -> Any:
        try:
            return arrived(self._fetched(remote))
        except tf.errors.OpError as error:
            raise RuntimeError(_in_words(error)) from error
        finally:
            self._free.release()

    def _fetched(self, remote: Any) -> Any:
        with contextlib.suppress(tf.errors.OpError):
            return remote.fetch()
        # A worker may have died with the result in its hands. Then the step is taken again, by another, which takes
        # its turn among those that were sent; if the step itself has failed, this raises why.
        self._coordinator.join()
        return remote.fetch()

    def _raise_failed(self) -> None:
        done = {future for future in self._pending if future.done()}
        failed = {future for future in done if future.exception()}
        self._pending -= done - failed
        if failed:
            self._fail()

    def _fail(self, first: Exception | None = None) -> NoReturn:
        wait(self._pending)
        found = [first, self._left_at_coordinator(), *(future.exception() for future in self._pending)]
        self._pending.clear()
        # When a step fails, those of other workers are cancelled, which may be heard of first.
        errors = [each for each in found if isinstance(each, Exception)]
        error = min(errors, key=lambda each: isinstance(each.__cause__ or each, tf.errors.CancelledError))
        if isinstance(error, tf.errors.OpError):
            raise RuntimeError(_in_words(error)) from error
        raise error

    def _left_at_coordinator(self) -> Exception | None:
        """The error that nobody has heard of yet, which the next step would be blamed for."""
        try:
            self._coordinator.join()
        except Exception as error:
            return error
        return None


def _in_words(error: tf.errors.OpError) -> str:
    message = str(error.message)
    lines = [_NODE.sub("", line).strip() for line in message.splitlines() if "root error(s) found" not in line]
    said = next((line for line in lines if line), "")[:500]
    if "/job:ps" in message and isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
        return (
            "A parameter server is gone, and with it the weights that it held. Start the whole cluster again, and go "
            f"on from a backup. TensorFlow says: {said}"
        )
    return f"A step failed on its worker, and those after it were called off. {type(error).__name__}: {said}"
