"""When a thread waits for Python's interpreter lock, as a trace shows it."""

import bisect
from collections.abc import Sequence

from keras_paragrad.profiling.analysis.coverage import Span


def lock_waits(calls: Sequence[Span], executions: Sequence[Span]) -> list[Span]:
    """When calls into TensorFlow have done their work and wait for the interpreter lock to return to Python.

    Args:
        calls: A thread's calls from Python into TensorFlow.
        executions: What these did with the lock released.

    Example:

    >>> from keras_paragrad.profiling.analysis.interpreter_lock import lock_waits
    >>> lock_waits([(0, 90), (100, 104)], [(1, 20), (101, 104)])
    [(20, 90)]
    """
    executions = sorted(executions)
    begins = [begin for begin, _ in executions]
    found = []
    for begin, end in calls:
        inside = executions[bisect.bisect_left(begins, begin) : bisect.bisect_left(begins, end)]
        done = max((one_end for _, one_end in inside), default=end)
        if done < end:
            found.append((done, end))
    return found
