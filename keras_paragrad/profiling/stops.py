"""The time for which `Profiler` has paused training, which `Throughput` excludes."""

import contextlib
import time
from collections.abc import Iterator
from typing import ClassVar


class Stops:
    """The time that training was paused to start and stop windows, per process, as a process has one profiler.

    Attributes:
        seconds: The total so far.

    Example:

    >>> from keras_paragrad.profiling.stops import Stops
    >>> before = Stops.seconds
    >>> with Stops.counted():
    ...     pass
    >>> 0 < Stops.seconds - before < 1
    True
    """

    seconds: ClassVar[float] = 0.0

    @classmethod
    @contextlib.contextmanager
    def counted(cls) -> Iterator[None]:
        """Context manager or decorator that adds the time of its body; must not be nested."""
        began = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - began
