"""Computes from a trace where the time of each batch went."""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from keras_paragrad.profiling.analysis.events import (
    NANOSECONDS,
    Coverage,
    Marker,
    Pull,
    Span,
    Trace,
    TracedCall,
    Work,
)
from keras_paragrad.profiling.summary import StepTime

# After a thread has waited this long for the interpreter lock, another releases it (`sys.getswitchinterval`); in
# nanoseconds.
_SWITCH_INTERVAL = 5_000_000
# Maps an interval in nanoseconds to its parts in milliseconds, by name.
Parts = Callable[[float, float], dict[str, float]]


def step_times(trace: Trace) -> tuple[StepTime, ...]:
    """The batches that ran in a trace, in order.

    A batch's time runs from its marker's start to its end; if one marker covers several batches, from fetching one to
    fetching the next. Where activities overlap, the time counts for the first of: operations on a GPU or TPU, waiting
    for input, operations on the host's processors, collectives, compiling functions, other work of the host. That is
    xprof's order, with its host compute split up. A step that waits for Python's interpreter lock while Python makes
    batches waits for input too.
    """
    markers = sorted(_innermost(trace.markers), key=lambda marker: marker.begin)
    pulls = sorted(trace.pulls, key=lambda pull: pull.begin)
    parts: dict[int, Parts] = {}
    steps: list[StepTime] = []
    origin = begin_of(trace)
    for marker in markers:
        if marker.line not in parts:
            parts[marker.line] = _parts_on(trace, marker.line, markers)
        for step, update, begin, end in _batches(marker, pulls):
            duration = (end - begin) / NANOSECONDS
            shares = parts[marker.line](begin, end)
            steps.append(StepTime(step, update, (begin - origin) / NANOSECONDS, duration, **shares))
    return tuple(steps)


def begin_of(trace: Trace) -> float:
    """The origin of `StepTime.begins`, in nanoseconds."""
    return min((marker.begin for marker in _innermost(trace.markers)), default=0.0)


def _work_of(trace: Trace, line: int) -> list[Span]:
    """The work of other threads in functions that a thread called, directly or indirectly."""
    work: dict[str, list[Work]] = defaultdict(list)
    for each in trace.work:
        work[each.flow].append(each)
    remaining = [call for call in trace.calls if call.line != line]
    started = new = _pop_work([call for call in trace.calls if call.line == line], work)
    while new and remaining:
        spans_by_line: dict[int, list[Span]] = defaultdict(list)
        for each in new:
            spans_by_line[each.line].append((each.begin, each.end))
        covered = {each: Coverage(spans) for each, spans in spans_by_line.items()}
        inside, outside = [], []
        for call in remaining:
            is_inside = call.line in covered and covered[call.line].within(call.begin, call.begin + 1)
            (inside if is_inside else outside).append(call)
        remaining, new = outside, _pop_work(inside, work)
        started = started + new
    return [(each.begin, each.end) for each in started]


def _pop_work(calls: list[TracedCall], work: dict[str, list[Work]]) -> list[Work]:
    return [each for call in calls for each in work.pop(call.flow, [])]


def lock_waits(calls: Sequence[Span], executions: Sequence[Span]) -> list[Span]:
    """When a thread waits for the interpreter lock: to return from TensorFlow, or between two calls into it.

    A call waits once its work is done. Between calls, a thread is assumed to wait once the switch interval has passed,
    as a trace doesn't show whether it runs Python code itself. So this holds only while another thread runs Python.

    Args:
        calls: A thread's calls from Python into TensorFlow.
        executions: The parts of these that run with the lock released.

    Example:

    >>> from keras_paragrad.profiling.analysis.steps import lock_waits
    >>> lock_waits([(0, 90), (100, 104)], [(1, 20), (101, 104)])
    [(20, 90)]
    >>> lock_waits([(0, 10), (30_000_000, 30_000_010)], [])
    [(5000010, 30000000)]
    """
    calls, executions = sorted(calls), sorted(executions)
    returned = itertools.accumulate((end for _, end in calls), max)
    requested = [end + _SWITCH_INTERVAL for end in returned]
    waits = [(at, begin) for at, (begin, _) in zip(requested, calls[1:], strict=False) if at < begin]
    begins = [begin for begin, _ in executions]
    for begin, end in calls:
        inside = executions[bisect.bisect_left(begins, begin) : bisect.bisect_left(begins, end)]
        done = max((one_end for _, one_end in inside), default=end)
        if done < end:
            waits.append((done, end))
    return waits


def _innermost(markers: list[Marker]) -> list[Marker]:
    """Markers of batches where there are any, and of steps otherwise."""
    return [marker for marker in markers if "batch" in marker.stats] or markers


def _batches(marker: Marker, pulls: list[Pull]) -> Iterator[tuple[int, int | None, float, float]]:
    """The batches of one marker: number, update, begin and end."""
    stats = marker.stats
    first = int(stats.get("batch", stats.get("step_num", 0)))
    requested = int(stats.get("count", 1))
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
    split = len(filled) >= replicas and requested > 1
    count = min(requested, len(filled) // replicas) if split else requested
    cuts = [marker.begin, *_cuts(marker, filled, count), marker.end]
    for index, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        yield first + index, _update(stats, index), begin, end


def _cuts(marker: Marker, filled: list[float], count: int) -> list[float]:
    """The boundaries between a marker's batches: where each is fetched, or else at equal intervals."""
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
    """Makes the function that splits the time of a thread's steps into parts."""
    steps = [(marker.begin, marker.end) for marker in markers if marker.line == line]
    host = Coverage(_clip([*trace.host[line], *_work_of(trace, line)], steps))
    waits = Coverage(lock_waits(trace.python_calls[line], trace.lock_released[line]))
    waiting = Coverage(trace.input) | (waits & Coverage(trace.python_input))
    # Operations outside of the host's work are the input pipeline's, which runs concurrently.
    operations = Coverage(trace.operations) & host
    device = Coverage(trace.device)
    compiling = Coverage(_clip([(call.begin, call.end) for call in trace.compiling(line)], steps))
    layers = [device]
    for more in (waiting, operations, Coverage(_clip(trace.collective, steps)), compiling, host):
        layers.append(layers[-1] | more)

    def parts(begin: float, end: float) -> dict[str, float]:
        covered = [layer.within(begin, end) / NANOSECONDS for layer in layers]
        on_device, with_input, with_operations, with_collectives, with_compiling, total = covered
        return {
            "input": with_input - on_device,
            "compute": on_device + with_operations - with_input,
            "collective": with_collectives - with_operations,
            "compile": with_compiling - with_collectives,
            "host": total - with_compiling,
            "idle": (end - begin) / NANOSECONDS - total,
        }

    return parts


def _clip(spans: list[Span], steps: list[Span]) -> list[Span]:
    """Clips spans at the end of the step in which they begin, so that none counts for the next."""
    begins = [begin for begin, _ in steps]
    clipped = []
    for begin, end in spans:
        index = bisect.bisect_right(begins, begin) - 1
        if index >= 0:
            clipped.append((begin, min(end, steps[index][1])))
    return clipped
