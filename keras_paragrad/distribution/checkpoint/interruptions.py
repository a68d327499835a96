"""What interrupts training: SIGTERM, after which all workers stop at the same step; and a lost worker, explained."""

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import gather
from keras_paragrad.distribution.checkpoint.files import Position
from keras_paragrad.distribution.cluster import Cluster

_log = logging.getLogger("keras_paragrad")
# Time between two checks.
SECONDS = 1.0


class TrainingInterrupted(SystemExit):  # noqa: N818
    """Training was stopped by SIGTERM, was backed up, and left `fit`.

    It need not be caught: the process then exits with status 143, like one terminated by SIGTERM. Running the same
    command again resumes training.

    Args:
        position: The position of training.
        saved: Whether that position was backed up.

    Attributes:
        code: 143, the exit status.
    """

    def __init__(self, position: Position, saved: bool):
        super().__init__(143)
        self.position = position
        self.saved = saved


class StopRequest:
    """Whether SIGTERM has been received since `listen`.

    The previous handler is called too. A second SIGTERM has its default effect.
    """

    def __init__(self):
        self.received = False
        self._listening = False
        self._previous: signal.Handlers | object | None = None

    def listen(self) -> None:
        """Installs the handler, which only the main thread can do."""
        self.received = False
        if self._listening:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "fit runs outside the main thread, where Python can't handle signals: on SIGTERM this worker ends "
                "without a backup. Call fit in the main thread, or pass on_sigterm=False."
            )
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._listening = True

    def restore(self) -> None:
        """Restores the previous handler, unless another one has been installed since."""
        if self._listening:
            self._restore_handler()
        self._listening = False

    def _restore_handler(self) -> bool:
        """Restores the previous handler, unless another one was installed since; returns whether it did."""
        installed = signal.getsignal(signal.SIGTERM) == self._handle
        if installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)  # pyright: ignore
        return installed

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Records the first SIGTERM; a second one ends the process."""
        if self._listening and not self.received:
            self.received = True
        else:
            # A handler installed later may have restored this one after `restore`.
            self._listening = False
            if self._restore_handler():
                os.kill(os.getpid(), number)
                return
        if callable(self._previous):
            self._previous(number, frame)


class Answers(NamedTuple):
    """Whether a worker has received SIGTERM; and whether all have written their part of a backup."""

    stop: bool
    all_done: bool


class StopChecks:
    """Asks, on all workers after the same step, whether to stop, and whether a backup is written.

    A check is an all-reduce of some milliseconds. Checks are about a second apart by the chief's clock.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int):
        self._strategy = strategy
        self._workers = workers
        self._interval = self._remaining = 1
        self._checked_at = time.monotonic()

    def after_step(self, received: bool, done: bool) -> "Answers":
        """Asks all workers, if a check is due. Call it on every worker after each step."""
        self._remaining -= 1
        return self.ask(received, done) if self._workers == 1 or self._remaining <= 0 else Answers(False, False)

    def ask(self, received: bool, done: bool = False) -> "Answers":
        """Asks all workers."""
        if self._workers == 1:
            return Answers(received, done)
        # All workers take the chief's interval, from its row of answers.
        answers = gather(self._strategy, np.array([self._next_interval(), received, done], np.int64))
        self._interval = self._remaining = int(answers[0, 0])
        self._checked_at = time.monotonic()
        return Answers(bool(answers[:, 1].any()), bool(answers[:, 2].all()))

    def _next_interval(self) -> int:
        """Steps until the next check: about one second's worth."""
        steps = self._interval - self._remaining
        if steps <= 0:
            return self._interval
        seconds = (time.monotonic() - self._checked_at) / steps
        # Grows gradually: the first steps include compilation, and do not predict later ones.
        return max(1, min(int(SECONDS / max(seconds, 1e-6)), 8 * self._interval))


# Parts of the messages of TensorFlow's errors after a worker was lost.
_SIGNS = (
    "Collective ops is aborted",
    "coordination service",
    "CoordinationService",
    "stopped sending heartbeats",
    "Connection reset by peer",
    "Socket closed",
    "failed to connect to all addresses",
    "RecvBuf",
)
# A task that is not part of a device name.
_TASK = re.compile(r"/job:(chief|worker)/replica:\d+/task:(\d+)(?![\d/])")
_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


class WorkerLostError(RuntimeError):
    """Another worker of the cluster has died or stopped responding, so this one can't continue."""


@contextlib.contextmanager
def explained_failures(cluster: Cluster | None) -> Generator[None]:
    """Context in which TensorFlow errors caused by a lost worker are raised as `WorkerLostError`.

    TensorFlow's coordination service detects lost workers by heartbeats, regardless of what the other workers are
    waiting for.
    """
    try:
        yield
    except _ERRORS as error:
        # Without the name of a graph's node.
        lines = [re.sub(r"^\{\{.*?\}\} ", "", line.strip()) for line in str(error).splitlines()]
        lost = next((line[:300] for line in lines if any(sign in line for sign in _SIGNS)), None)
        if cluster is None or cluster.worker_count == 1 or lost is None:
            raise
        raise WorkerLostError(
            f"Worker {cluster.rank} of {cluster.worker_count} lost its connection to {_suspects(cluster, str(error))}. "
            "Most likely that process was killed, ran out of memory, was preempted, or failed with an error shown at "
            "the end of its output. The network may also have failed. Restart all workers: with "
            "dist.callbacks(directory) they resume from the last backup, and `python -m keras_paragrad launch "
            f"--max-restarts 3` restarts them automatically. TensorFlow said: {lost}"
        ) from error


def _suspects(cluster: Cluster, text: str) -> str:
    """The workers that TensorFlow names, or all others."""
    offsets = {"chief": 0, "worker": len(cluster.jobs.get("chief", ()))}
    named = {offsets[job] + int(index) for job, index in _TASK.findall(text)} - {cluster.rank}
    others = sorted(named) or [rank for rank in range(cluster.worker_count) if rank != cluster.rank]
    listed = [f"worker {rank} ({cluster.workers[rank]})" for rank in others if rank < cluster.worker_count]
    if len(listed) > 8:
        listed = [*listed[:8], f"{len(listed) - 8} more"]
    return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"
