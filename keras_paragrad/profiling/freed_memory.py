"""Lets TensorFlow's profiler end where it would crash the training: on several workers.

TensorFlow 2.21 collects the events of all threads in a `std::vector` of `std::deque`s, and remembers where those are
that end what another thread began, which collectives between workers do. The vector grows by copying, as libstdc++
can't move a deque without allocating, and frees what it has copied. Then the remembered places are looked up, and
written to if what still stands there is the identifier of an event (`TraceMeRecorder::Consume`, `SplitEventTracker`).
Without what is done here, the second of two workers crashed within 150 windows in each of three runs.

What remains: a first window still crashed once in 25 trainings. glibc does not overwrite the first pieces of each size
that a thread frees, but keeps them: where threads were to keep 60000 instead of seven, 4 of 11 trainings crashed.
"""

import contextlib
import ctypes
from collections.abc import Iterator

# Of glibc's malloc.h.
_M_PERTURB = -6
_ANY_BYTE = 0xA5


@contextlib.contextmanager
def overwritten_when_freed() -> Iterator[None]:
    """In it, glibc overwrites memory as it is freed, so that no identifier of an event is left in there.

    Elsewhere nothing happens: other C++ libraries move a deque, and don't free what the profiler remembers.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, _ANY_BYTE)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
