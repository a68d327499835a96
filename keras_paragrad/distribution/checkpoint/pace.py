"""How often workers check whether one of them was asked to stop."""

import time

import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.workers import gather

SECONDS = 1.0


class StopChecks:
    """Determines, on all workers after the same step, whether one of them has been asked to stop.

    A check is a small all-reduce of some milliseconds. Unless the interval is fixed, it is the number of steps that
    take about a second by the chief's clock, on all workers.

    Args:
        strategy: The strategy; all its workers call this.
        workers: Number of workers; with one, nothing is reduced.
        every: Number of steps between checks, or `None` for about every second.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: int, every: int | None):
        self._strategy = strategy
        self._workers = workers
        self._every = every
        self._interval = self._left = every or 1
        self._asked = time.monotonic()

    def after_step(self, received: bool) -> bool:
        """Whether to stop after this step. Call it on every worker after each step."""
        self._left -= 1
        return received if self._workers == 1 else self._left <= 0 and self.ask(received)

    def ask(self, received: bool) -> bool:
        """Whether a worker has been asked to stop."""
        if self._workers == 1:
            return received
        answers = gather(self._strategy, np.array([received, self._next_interval()], np.int64))
        self._interval = self._left = int(answers[0, 1])
        self._asked = time.monotonic()
        return bool(answers[:, 0].any())

    def _next_interval(self) -> int:
        steps = self._interval - self._left
        if self._every or steps <= 0:
            return self._interval
        seconds = (time.monotonic() - self._asked) / steps
        # Grows gradually: the first steps include compilation, and do not predict later ones.
        return max(1, min(int(SECONDS / max(seconds, 1e-6)), 8 * self._interval))
