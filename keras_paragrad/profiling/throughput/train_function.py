"""Watches a train function: how long its calls take, and when they retrace."""

import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.engine.telemetry.counts import TracedGraph, compiled_functions, graphs_of, newest_trace

_KEPT = 1000


class Clock:
    """Wraps a train function and times its calls; other attributes are delegated to it.

    Args:
        function: The train function.
        ended: Called after each call that ran, with the iterator and the times before and after.
        failed: Called when a call fails, of which Keras doesn't notify callbacks.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        ended: Callable[[Any, float, float], None],
        failed: Callable[[], None],
    ) -> None:
        self.function, self.ended, self.failed = function, ended, failed

    def __call__(self, iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            logs = self.function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self.failed()
            raise
        self.ended(iterator, began, time.perf_counter())
        return logs


class StepTimes:
    """The times of the latest steps.

    Example:

    >>> from keras_paragrad.profiling.throughput.train_function import StepTimes
    >>> times = StepTimes()
    >>> for seconds in (0.001, 0.002, 0.003):
    ...     times.add(seconds)
    >>> times.percentiles()
    (2.0, 2.9)
    """

    def __init__(self):
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        """Records a call whose steps took `seconds` each."""
        self._seconds.append(seconds)

    def percentiles(self) -> tuple[float, float]:
        """The median and the 95th percentile of the latest thousand calls, in milliseconds; NaN without any."""
        if not self._seconds:
            return float("nan"), float("nan")
        median, high = np.percentile(self._seconds, (50, 95)) * 1e3
        return round(float(median), 6), round(float(high), 6)


class Retraces:
    """Counts the retraces of a train function's graphs; the first trace of each doesn't count.

    Attributes:
        count: The number of retraces.
    """

    def __init__(self):
        self.count = 0
        self._function: Any = None
        self._traced: list[Any] = []
        self._graphs: list[Sized] = []
        self._counts: list[int] = []

    def watch(self, function: Any) -> None:
        """Observes this train function from now on."""
        if function is self._function:
            return
        before = {id(each): count for each, count in zip(self._traced, self._counts, strict=True)}
        self._function, self._traced = function, compiled_functions(function)
        self._graphs = [graphs_of(each) for each in self._traced]
        so_far = map(len, self._graphs)
        self._counts = [before.get(id(each), count) for each, count in zip(self._traced, so_far, strict=True)]

    def happened(self) -> bool:
        """Whether graphs were traced since the last `look`."""
        # This runs in every step.
        return list(map(len, self._graphs)) != self._counts

    def look(self) -> list[TracedGraph]:
        """The graphs retraced since the last call; of nested ones, only the outermost."""
        before, self._counts = self._counts, list(map(len, self._graphs))
        again = [
            newest_trace(function)
            for function, was, count in zip(self._traced, before, self._counts, strict=True)
            if 0 < was < count
        ]
        self.count += bool(again)
        return again[:1]
