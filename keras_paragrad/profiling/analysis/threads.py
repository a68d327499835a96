"""What other threads have to do with a thread's steps: the work they do for it, and the interpreter lock they hold."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Sequence

from keras_paragrad.profiling.analysis.coverage import Coverage, Span
from keras_paragrad.profiling.analysis.events import Trace, TracedCall, Work

# Python asks a thread for the lock when another has waited this long (`sys.getswitchinterval`); in nanoseconds.
SWITCH_INTERVAL = 5_000_000


def work_of(trace: Trace, line: int) -> list[Span]:
    """The work of other threads in functions that a thread called, directly or indirectly.

    Args:
        trace: What was read from a file.
        line: The thread that runs the steps.
    """
    work: dict[str, list[Work]] = defaultdict(list)
    for each in trace.work:
        work[each.flow].append(each)
    left = [call for call in trace.calls if call.line != line]
    found = _begun([call for call in trace.calls if call.line == line], work)
    new = found
    while new and left:
        doing: dict[int, list[Span]] = defaultdict(list)
        for each in new:
            doing[each.line].append((each.begin, each.end))
        covered = {each: Coverage(spans) for each, spans in doing.items()}
        inside, outside = [], []
        for call in left:
            is_inside = call.line in covered and covered[call.line].within(call.begin, call.begin + 1)
            (inside if is_inside else outside).append(call)
        left, new = outside, _begun(inside, work)
        found = found + new
    return [(each.begin, each.end) for each in found]


def _begun(calls: list[TracedCall], work: dict[str, list[Work]]) -> list[Work]:
    return [each for call in calls for each in work.pop(call.flow, [])]


def lock_waits(calls: Sequence[Span], executions: Sequence[Span]) -> list[Span]:
    """When a thread waits for the interpreter lock: to return from TensorFlow, or between two calls into it.

    A call waits once its work is done. Between calls, a thread is assumed to wait once the switch interval has passed:
    a trace doesn't show whether it ran Python code itself. So use this only for times in which another thread runs
    Python.

    Args:
        calls: A thread's calls from Python into TensorFlow.
        executions: What these did with the lock released.

    Example:

    >>> from keras_paragrad.profiling.analysis.threads import lock_waits
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
