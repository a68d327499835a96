"""Measures a train function for `Throughput`: step times, retraces, and examples and updates per second."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import BatchIterator, StepLogs, TrainFunction
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.engine.telemetry.train_functions import (
    TracedGraph,
    compiled_functions,
    examples_seen,
    newest_trace,
)


class Clock:
    """Wraps a train function and times its calls."""

    def __init__(
        self,
        function: TrainFunction,
        on_end: Callable[[BatchIterator, float, float], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.function, self.on_end, self.on_failure = function, on_end, on_failure

    def __call__(self, iterator: BatchIterator) -> StepLogs:
        start = time.perf_counter()
        try:
            logs = self.function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            # The data has ended.
            raise
        except BaseException:
            self.on_failure()
            raise
        self.on_end(iterator, start, time.perf_counter())
        return logs


class Retraces:
    """Counts the retraces of a train function's graphs; the first trace of each doesn't count."""

    def __init__(self):
        self.count = 0
        self._function: Any = None
        self._traced: list[Any] = []
        self._counts: list[int] = []

    def watch(self, function: TrainFunction) -> None:
        """Starts observing a train function."""
        if function is self._function:
            return
        # A new train function may call functions of the previous one, which keep their counts.
        previous = {id(function): count for function, count in zip(self._traced, self._counts, strict=True)}
        self._function, self._traced = function, compiled_functions(function)
        counts = _traces(self._traced)
        self._counts = [previous.get(id(function), count) for function, count in zip(self._traced, counts, strict=True)]

    def traced(self) -> bool:
        """Whether graphs were traced since the last `take_retraced`."""
        # This runs in every step.
        return _traces(self._traced) != self._counts

    def take_retraced(self) -> list[TracedGraph]:
        """Returns the newest retraced graph as a list of at most one, and counts it; of nested ones, the outermost."""
        previous, self._counts = self._counts, _traces(self._traced)
        retraced = [
            newest_trace(function)
            for function, before, after in zip(self._traced, previous, self._counts, strict=True)
            if 0 < before < after
        ]
        self.count += bool(retraced)
        return retraced[:1]


def _traces(functions: Sequence[Any]) -> list[int]:
    """The number of graphs traced for each function."""
    return [function.experimental_get_tracing_count() for function in functions]


class Pace:
    """Counts a model's steps, updates and examples within an epoch, and the time they take.

    Attributes:
        start: When it last started counting, shifted by the time excluded since.
        steps: Number of steps in this epoch.
        update: Number of the optimizer's updates when it last started counting.
    """

    def __init__(self, model: keras.Model, batch_size: int | None):
        self.model, self.batch_size = model, batch_size
        self._workers = replica_placement(model.distribute_strategy).workers
        self.begin(0.0)

    def begin(self, now: float, steps: int = 0) -> None:
        """Restarts counting, `steps` steps into the epoch."""
        self.start, self.steps, self._first_step = now, steps, steps
        self._excluded_steps = 0
        self._examples, self.update = self.examples() if steps else 0.0, self.updates()
        # Examples, the seconds in which they were counted, updates and their seconds: since then, and latest.
        self._total, self._latest = np.zeros(4), np.zeros(4)

    def examples(self) -> float | None:
        """Number of examples in this epoch over all workers; `None` if unknown."""
        seen = examples_seen(self.model)
        if seen:
            # Workers get equal parts of a batch, and summing their counts would take a collective.
            return seen * self._workers
        return None if self.batch_size is None else float(self.batch_size * self.steps)

    def updates(self) -> int:
        """Number of the optimizer's updates."""
        return int(self.model.optimizer.iterations.numpy())

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Excludes some time, and the steps that ran in it, from the next rates."""
        self.start += seconds
        self._excluded_steps += steps

    def rates(self, now: float, *, of_epoch: bool) -> dict[str, float]:
        """Examples and updates per second, of the epoch or since the last call; restarts counting the latter.

        A rate that isn't known is left out. Excluded steps are assumed to have the average number of examples.
        """
        seconds, steps = now - self.start, self.steps - self._first_step
        if seconds > 0 and steps > self._excluded_steps:
            share = 1 - self._excluded_steps / steps
            examples, updates = self.examples(), self.updates()
            new = 0.0 if examples is None or self._examples is None else examples - self._examples
            # Otherwise the metrics were reset, as by an `evaluate` in the middle of the epoch.
            counted = (new * share, seconds) if new > 0 else (0.0, 0.0)
            self._latest = np.array([*counted, (updates - self.update) * share, seconds])
            self._total += self._latest
            self.start, self._first_step, self._examples, self.update = now, self.steps, examples, updates
            self._excluded_steps = 0
        sums = (self._total if of_epoch else self._latest).reshape(2, 2)
        names = ("examples_per_second", "updates_per_second")
        return {name: count / time for name, (count, time) in zip(names, sums.tolist(), strict=True) if time}
