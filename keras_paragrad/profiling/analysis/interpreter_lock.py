"""Finds in a trace when a thread waits for Python's global interpreter lock (GIL)."""

import bisect
import itertools
from collections.abc import Sequence

from keras_paragrad.profiling.analysis.coverage import Span

# Python asks a thread for the lock when another has waited this long (`sys.getswitchinterval`); in nanoseconds.
SWITCH_INTERVAL = 5_000_000


def lock_waits(calls: Sequence[Span], executions: Sequence[Span]) -> list[Span]:
    """When a thread waits for the interpreter lock: to return from TensorFlow, or between two calls into it.

    A call waits once its work is done. Between calls, a thread is assumed to wait once the switch interval has passed:
    a trace doesn't show whether it ran Python code itself. So use this only for times in which another thread runs
    Python.

    Args:
        calls: A thread's calls from Python into TensorFlow.
        executions: What these did with the lock released.

    Example:

    >>> from keras_paragrad.profiling.analysis.interpreter_lock import lock_waits
    >>> lock_waits([(0, 90), (100, 104)], [(1, 20), (101, 104)])
    [(20, 90)]
    >>> lock_waits([(0, 10), (30_000_000, 30_000_010)], [])
    [(5000010, 30000000)]
    """
    calls, executions = sorted(calls), sorted(executions)
    returned = itertools.accumulate((end for _, end in calls), max)
    asked = [end + SWITCH_INTERVAL for end in returned]
    found = [(at, begin) for at, (begin, _) in zip(asked, calls[1:], strict=False) if at < begin]
    begins = [begin for begin, _ in executions]
    for begin, end in calls:
        inside = executions[bisect.bisect_left(begins, begin) : bisect.bisect_left(begins, end)]
        done = max((one_end for _, one_end in inside), default=end)
        if done < end:
            found.append((done, end))
    return found
