"""Times the calls of a train function."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_KEPT = 1000


class Clock:
    """Wraps a train function and times its calls; other attributes are delegated to it.

    Args:
        function: The train function.
        ended: Called after each call that ran, with the iterator and the times before and after.
        broke_off: Called when a call fails, of which Keras doesn't notify callbacks.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        ended: Callable[[Any, float, float], None],
        broke_off: Callable[[], None],
    ) -> None:
        self.function, self.ended, self.broke_off = function, ended, broke_off

    def __call__(self, iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            logs = self.function(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            self.broke_off()
            raise
        self.ended(iterator, began, time.perf_counter())
        return logs


class StepTimes:
    """The times of the latest steps.

    Example:

    >>> from keras_paragrad.profiling.throughput.clock import StepTimes
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
