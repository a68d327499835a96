"""Which work of other threads belongs to a thread's steps."""

from collections import defaultdict

from keras_paragrad.profiling.analysis.coverage import Coverage, Span
from keras_paragrad.profiling.analysis.events import Trace, TracedCall, Work


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
