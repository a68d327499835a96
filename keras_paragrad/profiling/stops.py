"""How long `Profiler` has held training up, which `Throughput` leaves out of its figures."""

import contextlib
import time
from collections.abc import Iterator
from typing import ClassVar


class Stops:
    """The time that beginning and ending windows took while training stood still; a process has one profiler.

    Attributes:
        seconds: How long that was so far.

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
        """Counts the time of what runs inside, as a context or a decorator; not within itself."""
        began = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - began
