"""Computes from a trace where the time of each batch went."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from keras_paragrad.profiling.analysis.coverage import Coverage, Span
from keras_paragrad.profiling.analysis.events import Marker, Pull, Trace, TracedCall, Work
from keras_paragrad.profiling.summary import StepTime

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

    >>> from keras_paragrad.profiling.analysis.steps import lock_waits
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


NANOSECONDS = 1e6
# Maps an interval in nanoseconds to its parts in milliseconds, by name.
Parts = Callable[[float, float], dict[str, float]]


def step_times(trace: Trace) -> tuple[StepTime, ...]:
    """The batches that ran in a trace, in order.

    A batch's time runs from its marker's start to its end; if one marker covers several batches, from fetching one to
    fetching the next. Where activities overlap, the time counts for the first of: operations
    on a GPU or TPU, waiting for input, operations on the host's processors, collectives, compiling functions, other
    work of the host. That is xprof's order, with its host compute split up. A step that waits for Python's interpreter
    lock while Python makes batches waits for input too.

    Args:
        trace: What was read from a file.
    """
    markers = sorted(_innermost(trace.markers), key=lambda marker: marker.begin)
    pulls = sorted(trace.pulls, key=lambda pull: pull.begin)
    parts: dict[int, Parts] = {}
    found: list[StepTime] = []
    for marker in markers:
        if marker.line not in parts:
            parts[marker.line] = _parts_on(trace, marker.line, markers)
        origin = begin_of(trace)
        for step, update, begin, end in _batches(marker, pulls):
            duration = (end - begin) / NANOSECONDS
            shares = parts[marker.line](begin, end)
            found.append(StepTime(step, update, (begin - origin) / NANOSECONDS, duration, **shares))
    return tuple(found)


def begin_of(trace: Trace) -> float:
    """What `StepTime.begins` is relative to, in nanoseconds."""
    return min((marker.begin for marker in _innermost(trace.markers)), default=0.0)


def _innermost(markers: list[Marker]) -> list[Marker]:
    """Markers of batches where there are any, and of steps otherwise."""
    return [marker for marker in markers if "batch" in marker.stats] or markers


def _batches(marker: Marker, pulls: list[Pull]) -> Iterator[tuple[int, int | None, float, float]]:
    """The batches of one marker: number, update, beginning and end."""
    stats = marker.stats
    first = int(stats.get("batch", stats.get("step_num", 0)))
    asked = int(stats.get("count", 1))
    begins = [pull.begin for pull in pulls]
    inside = pulls[bisect.bisect_left(begins, marker.begin) : bisect.bisect_left(begins, marker.end)]
    filled = [pull.begin for pull in inside if pull.filled]
    if inside and not filled:
        # The data had ended.
        return
    if "batch" in stats and "ran" not in stats:
        return
    # Every replica fetches its own.
    replicas = int(stats.get("pulls", 1))
    count = min(asked, len(filled) // replicas) if len(filled) >= replicas and asked > 1 else asked
    cuts = [marker.begin, *_cuts(marker, filled, count), marker.end]
    for index, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        yield first + index, _update(stats, index), begin, end


def _cuts(marker: Marker, filled: list[float], count: int) -> list[float]:
    """The boundaries between a marker's batches: where each is fetched, or else in equal parts."""
    if len(filled) >= count > 1:
        return [filled[index * len(filled) // count] for index in range(1, count)]
    length = (marker.end - marker.begin) / count
    return [marker.begin + length * index for index in range(1, count)]


def _update(stats: dict[str, str], index: int) -> int | None:
    if "update" not in stats:
        return None
    left, each = int(stats.get("left", 1)), int(stats.get("each", 1))
    return int(stats["update"]) + (0 if index < left else 1 + (index - left) // each)


def _parts_on(trace: Trace, line: int, markers: list[Marker]) -> Parts:
    """The function that splits the time of a thread's steps into parts."""
    steps = [(marker.begin, marker.end) for marker in markers if marker.line == line]
    host = Coverage(_cut_off([*trace.host[line], *work_of(trace, line)], steps))
    locked_out = Coverage(lock_waits(trace.python_calls[line], trace.without_lock[line]))
    waiting = Coverage(trace.input) | (locked_out & Coverage(trace.made_by_python))
    # Operations of the input pipeline run concurrently, even when no step is waiting for operations.
    operations = Coverage(trace.operations) & host
    device = Coverage(trace.device)
    compiling = Coverage(_cut_off([(call.begin, call.end) for call in trace.compiling(line)], steps))
    layers = [device]
    for more in (waiting, operations, Coverage(_cut_off(trace.collective, steps)), compiling, host):
        layers.append(layers[-1] | more)

    def parts(begin: float, end: float) -> dict[str, float]:
        covered = [layer.within(begin, end) / NANOSECONDS for layer in layers]
        on_device, with_input, with_operations, with_collectives, with_compiling, all_of_it = covered
        return {
            "input": with_input - on_device,
            "compute": on_device + with_operations - with_input,
            "collective": with_collectives - with_operations,
            "compile": with_compiling - with_collectives,
            "host": all_of_it - with_compiling,
            "idle": (end - begin) / NANOSECONDS - all_of_it,
        }

    return parts


def _cut_off(spans: list[Span], steps: list[Span]) -> list[Span]:
    """Clips spans at the end of the step in which they began: the remainder doesn't belong to the next step."""
    begins = [begin for begin, _ in steps]
    found = []
    for begin, end in spans:
        index = bisect.bisect_right(begins, begin) - 1
        if index >= 0:
            found.append((begin, min(end, steps[index][1])))
    return found
