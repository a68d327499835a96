"""Dispatches steps to workers: a limited number at a time, with clear errors if one fails."""

import contextlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import tensorflow as tf

STEPS_FOR_EACH_WORKER = 2
# The prefix that TensorFlow adds to a message for each function it passes through.
_NODE = re.compile(r"\(\d+\) [A-Z_]+: |\{\{\w+ [^}]*\}\}")


class Dispatcher:
    """Dispatches steps to workers; each free worker takes the next one in the queue.

    Args:
        coordinator: Schedules functions on the workers.
        workers: Number of workers.
        in_flight: How many steps may be queued or running at a time; two per worker by default.
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
        """Runs a step on the next free worker; blocks while too many are in flight.

        Args:
            step: A `tf.function`.
            batch: Its argument.
            arrived: Called in a separate thread with the step's result, as NumPy arrays.

        Returns:
            The future of the step.

        Raises:
            RuntimeError: A step that was sent earlier has failed on its worker.
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
        """Waits until all results have arrived.

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
        """Waits until all steps have completed or failed, and raises nothing."""
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
        # A worker may have died holding the result. Then the step is queued again for another worker; if the step
        # itself has failed, this raises its error.
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
        # When a step fails, those of other workers are cancelled, which may be reported first.
        errors = [each for each in found if isinstance(each, Exception)]
        error = min(errors, key=lambda each: isinstance(each.__cause__ or each, tf.errors.CancelledError))
        if isinstance(error, tf.errors.OpError):
            raise RuntimeError(_in_words(error)) from error
        raise error

    def _left_at_coordinator(self) -> Exception | None:
        """A pending error of the coordinator, which would otherwise be raised by the next step."""
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
            "A parameter server was lost, and with it the weights that it held. Restart the whole cluster, and resume "
            f"from a backup. TensorFlow says: {said}"
        )
    return f"A step failed on its worker, and the steps after it were cancelled. {type(error).__name__}: {said}"
