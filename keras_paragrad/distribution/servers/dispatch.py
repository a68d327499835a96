"""Dispatches steps to workers, a limited number at a time, and explains the errors of failed ones."""

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import tensorflow as tf

from keras_paragrad.compat.data import CustomAdapter
from keras_paragrad.compat.types import Batch, Specs, Structure
from keras_paragrad.distribution.data import DistributedData

STEPS_PER_WORKER = 2
# The prefix that TensorFlow adds to an error message for each function that the error passes through.
_NODE = re.compile(r"\(\d+\) [A-Z_]+: |\{\{\w+ [^}]*\}\}")


class Dispatcher:
    """Dispatches steps to workers; each free worker takes the next one in the queue.

    Args:
        coordinator: Schedules functions on the workers.
        workers: Number of workers.
        in_flight: Number of steps queued or running at a time; two per worker by default.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, workers: int, in_flight: int | None = None
    ):
        self._coordinator = coordinator
        self.in_flight = in_flight or STEPS_PER_WORKER * workers
        # Acquired for each step in flight. A receiver's thread waits for its result.
        self._free = threading.BoundedSemaphore(self.in_flight)
        self._receivers = ThreadPoolExecutor(self.in_flight, thread_name_prefix="keras_paragrad-receiver")
        self._pending: set[Future[Any]] = set()

    def send(self, step: Callable[[Batch], Structure], batch: Batch, on_result: Callable[[Any], object]) -> Future[Any]:
        """Runs a step on the next free worker; blocks while too many are in flight.

        Args:
            step: A `tf.function`.
            batch: Its argument.
            on_result: Called in another thread with the step's result, as NumPy arrays.

        Returns:
            The future of the step.

        Raises:
            RuntimeError: An earlier step has failed on its worker.
        """
        self._raise_failed()
        self._free.acquire()
        try:
            remote = self._coordinator.schedule(step, args=(batch,))
        except Exception as error:
            self._free.release()
            self._fail(error)
        future = self._receivers.submit(self._receive, remote, on_result)
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

    def drain(self) -> None:
        """Waits until all steps have completed or failed, and raises nothing."""
        wait(self._pending)
        self._pending.clear()

    def _receive(self, remote: Any, on_result: Callable[[Any], object]) -> Any:
        """Waits for a scheduled step, and returns what `on_result` makes of its result; runs in another thread."""
        try:
            return on_result(self._fetch(remote))
        except tf.errors.OpError as error:
            raise RuntimeError(_explain(error)) from error
        finally:
            self._free.release()

    def _fetch(self, remote: Any) -> Any:
        """A step's result; if its worker was lost, waits until another has run the step."""
        with contextlib.suppress(tf.errors.OpError):
            return remote.fetch()
        # If the worker was lost before we read its result, `join` waits until another one has run the step; if the step
        # failed, it raises that error.
        self._coordinator.join()
        return remote.fetch()

    def _raise_failed(self) -> None:
        """Forgets the steps that have succeeded, and raises if one has failed."""
        done = {future for future in self._pending if future.done()}
        failed = {future for future in done if future.exception()}
        self._pending -= done - failed
        if failed:
            self._fail()

    def _fail(self, first: Exception | None = None) -> NoReturn:
        """Waits for all steps, and raises the error that caused all others; `first` is an error raised here, if any."""
        wait(self._pending)
        errors = [first, *(future.exception() for future in self._pending)]
        self._pending.clear()
        try:
            # Otherwise the next step would raise a pending error.
            self._coordinator.join()
        except Exception as error:
            errors.insert(1, error)
        # A failed step cancels other workers' steps, which may be reported first.
        causes = [error for error in errors if isinstance(error, Exception)]
        error = min(causes, key=lambda cause: isinstance(cause.__cause__ or cause, tf.errors.CancelledError))
        if isinstance(error, tf.errors.OpError):
            raise RuntimeError(_explain(error)) from error
        raise error


class PredictionAdapter(CustomAdapter):
    """Data for Keras's `predict`, in which workers predict later batches while it waits for one.

    Args:
        data: The batches.
        send: Sends a batch to a worker for prediction.
        ahead: Number of batches in flight.
    """

    def __init__(self, data: DistributedData, send: Callable[[Batch], Future[Any]], ahead: int):
        self._data = data
        self._futures = _Futures(data, send, ahead)

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._data.batch_size

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        """The dataset for Keras's trainer, which doesn't convert a `DistributedDataset`."""
        return self._futures


class _Futures(tf.distribute.DistributedDataset):
    """The futures of batches sent ahead, in order."""

    def __init__(self, data: DistributedData, send: Callable[[Batch], Future[Any]], ahead: int):
        self._data, self._send, self._ahead = data, send, ahead

    def __iter__(self) -> Iterator[Future[Any]]:
        sent: deque[Future[Any]] = deque()
        for batch in self._data:
            sent.append(self._send(batch))
            if len(sent) == self._ahead:
                yield sent.popleft()
        yield from sent

    @property
    def element_spec(self) -> Specs:
        """The type spec of a batch."""
        return self._data.element_spec


def _explain(error: tf.errors.OpError) -> str:
    """The message for an error of a step on a worker."""
    message = str(error.message)
    lines = [_NODE.sub("", line).strip() for line in message.splitlines() if "root error(s) found" not in line]
    reason = next((line for line in lines if line), "")[:500]
    if "/job:ps" in message and isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
        return (
            "A parameter server was lost, and with it the weights that it held. Restart the whole cluster, and resume "
            f"from a backup. TensorFlow says: {reason}"
        )
    return f"A step failed on its worker, and the steps after it were cancelled. {type(error).__name__}: {reason}"
