"""Computes from a trace where the time of each batch went, and how the stages of a pipeline overlapped.

A line of a trace is a thread, and a span is the beginning and the end of an event, in nanoseconds.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from keras_paragrad.profiling.analysis.events import NANOSECONDS, Coverage, Span, Trace, TraceEvent
from keras_paragrad.profiling.analysis.trace import STAGE
from keras_paragrad.profiling.summary import Communication, PipelineTime, StepTime

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
    markers = trace.steps
    pulls = sorted(trace.pulls, key=lambda pull: pull.begin)
    parts: dict[int, Parts] = {}
    steps: list[StepTime] = []
    origin = trace.begin
    for marker in markers:
        if marker.line not in parts:
            parts[marker.line] = _parts_on(trace, marker.line, markers)
        for batch in _batches(marker, pulls):
            begins, duration = (batch.begin - origin) / NANOSECONDS, (batch.end - batch.begin) / NANOSECONDS
            shares = parts[marker.line](batch.begin, batch.end)
            steps.append(StepTime(batch.number, batch.update, begins, duration, **shares))
    return tuple(steps)


def _work_of(trace: Trace, line: int) -> list[Span]:
    """The work of other threads in functions that a thread called, directly or indirectly."""
    work: dict[str, list[TraceEvent]] = defaultdict(list)
    for part in trace.work:
        work[part.flow].append(part)
    # Calls made within work that was found have started more work.
    remaining = [call for call in trace.calls if call.line != line]
    started = new = _pop_work([call for call in trace.calls if call.line == line], work)
    while new and remaining:
        spans_by_line: dict[int, list[Span]] = defaultdict(list)
        for part in new:
            spans_by_line[part.line].append((part.begin, part.end))
        covered = {line: Coverage(spans) for line, spans in spans_by_line.items()}
        inside, outside = [], []
        for call in remaining:
            # Whether work covers the nanosecond at which the call begins.
            is_inside = call.line in covered and covered[call.line].within(call.begin, call.begin + 1)
            (inside if is_inside else outside).append(call)
        remaining, new = outside, _pop_work(inside, work)
        started = started + new
    return [(part.begin, part.end) for part in started]


def _pop_work(calls: list[TraceEvent], work: dict[str, list[TraceEvent]]) -> list[TraceEvent]:
    return [part for call in calls for part in work.pop(call.flow, [])]


def lock_waits(calls: Sequence[Span], executions: Sequence[Span]) -> list[Span]:
    """When a thread waits for the interpreter lock: to return from TensorFlow, or between two calls into it.

    A call waits once its work is done. Between calls, a thread is assumed to wait once the switch interval has passed,
    as a trace doesn't show whether it runs Python code itself. So this holds only while another thread runs Python.
    """
    calls, executions = sorted(calls), sorted(executions)
    returned = itertools.accumulate((end for _, end in calls), max)
    # When the thread is assumed to wait, unless its next call has begun.
    starts = [end + _SWITCH_INTERVAL for end in returned]
    waits = [(start, begin) for start, (begin, _) in zip(starts, calls[1:], strict=False) if start < begin]
    begins = [begin for begin, _ in executions]
    for begin, end in calls:
        inside = executions[bisect.bisect_left(begins, begin) : bisect.bisect_left(begins, end)]
        done = max((one_end for _, one_end in inside), default=end)
        if done < end:
            waits.append((done, end))
    return waits


class _Batch(NamedTuple):
    """A batch, the update that it belongs to, and when it begins and ends, in nanoseconds."""

    number: int
    update: int | None
    begin: float
    end: float


def _batches(marker: TraceEvent, pulls: list[TraceEvent]) -> Iterator[_Batch]:
    """The batches of one marker that ran; one marker can cover several."""
    stats = marker.stats
    first = int(stats.get("batch", stats.get("step_num", 0)))
    requested = int(stats.get("count", 1))
    begins = [pull.begin for pull in pulls]
    inside = pulls[bisect.bisect_left(begins, marker.begin) : bisect.bisect_left(begins, marker.end)]
    filled = [pull.begin for pull in inside if "element_size" in pull.stats]
    if inside and not filled:
        # The data had ended.
        return
    if "batch" in stats and "ran" not in stats:
        return
    # Every replica fetches its own.
    replicas = int(stats.get("pulls", 1))
    split = len(filled) >= replicas and requested > 1
    count = min(requested, len(filled) // replicas) if split else requested
    # The batches are cut where each is fetched, or else at equal intervals.
    cuts = [marker.begin + (marker.end - marker.begin) / count * index for index in range(count)]
    if len(filled) >= count > 1:
        cuts[1:] = [filled[index * len(filled) // count] for index in range(1, count)]
    for index, (begin, end) in enumerate(zip(cuts, [*cuts[1:], marker.end], strict=True)):
        yield _Batch(first + index, _update(stats, index), begin, end)


def _update(stats: Mapping[str, str], index: int) -> int | None:
    """The update of a marker's batch: its first `left` batches complete the current one."""
    if "update" not in stats:
        return None
    left, per_update = int(stats.get("left", 1)), int(stats.get("each", 1))
    return int(stats["update"]) + (0 if index < left else 1 + (index - left) // per_update)


def _parts_on(trace: Trace, line: int, markers: list[TraceEvent]) -> Parts:
    """Makes the function that splits the time of a thread's steps into parts."""
    steps = [(marker.begin, marker.end) for marker in markers if marker.line == line]
    host = _host_work(trace, line, steps)
    waits = Coverage(lock_waits(trace.python_calls[line], trace.lock_released[line]))
    waiting = Coverage(trace.input) | (waits & Coverage(trace.python_input))
    # Operations outside of the host's work are the input pipeline's, which runs concurrently.
    operations = Coverage(trace.operations) & host
    device = Coverage(trace.device)
    # Each layer adds an activity to the ones before it, which come first where they overlap.
    compiling = Coverage(_clip([(call.begin, call.end) for call in trace.compiling(line)], steps))
    layers = [device]
    for activity in (waiting, operations, Coverage(_clip(trace.collective, steps)), compiling, host):
        layers.append(layers[-1] | activity)

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


def communication(trace: Trace) -> Communication | None:
    """How long collectives take in a trace's steps, summed over devices, in all and hidden; `None` without any.

    Where GPUs or TPUs have collectives, the hidden part is the time in which the same device computes. Collectives of
    the host are hidden by what any device of this process computes.
    """
    markers = trace.steps
    steps = [(marker.begin, marker.end) for marker in markers]
    working = Coverage(())
    for line in {marker.line for marker in markers}:
        working |= _host_work(trace, line, [(marker.begin, marker.end) for marker in markers if marker.line == line])
    computing = Coverage(trace.device) | (Coverage(trace.operations) & working)
    pairs = [
        (Coverage(spans) & Coverage(steps), Coverage(trace.device_compute[name]))
        for name, spans in trace.device_collectives.items()
    ] or [(Coverage(_clip(trace.collective, steps)), computing)]
    total = sum(collectives.total for collectives, _ in pairs)
    hidden = sum((collectives & compute).total for collectives, compute in pairs)
    return Communication(total / NANOSECONDS, hidden / NANOSECONDS) if total else None


def _host_work(trace: Trace, line: int, steps: list[Span]) -> Coverage:
    """When the host works on a thread's steps."""
    return Coverage(_clip([*trace.host[line], *_work_of(trace, line)], steps))


def _clip(spans: list[Span], steps: list[Span]) -> list[Span]:
    """Clips spans at the end of the step in which they begin, so that none counts for the next."""
    begins = [begin for begin, _ in steps]
    clipped = []
    for begin, end in spans:
        index = bisect.bisect_right(begins, begin) - 1
        if index >= 0:
            clipped.append((begin, min(end, steps[index][1])))
    return clipped


def pipeline_time(operations: Sequence[TraceEvent], steps: Sequence[StepTime], origin: float) -> PipelineTime | None:
    """How the stages overlap, or `None` if there are none.

    Example:

    >>> from keras_paragrad.profiling.analysis.events import TraceEvent
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> name = "pipeline_stage_{}_column_0_micro_batch_{}/MatMul"
    >>> forward = [TraceEvent(1e6 * (stage + part), 1e6 * (stage + part + 1), name=name.format(stage, part))
    ...            for stage in range(2) for part in range(3)]
    >>> times = pipeline_time(forward, [StepTime(0, 0, 0.0, 4.0)], 0.0)
    >>> times.bubble, times.ideal
    (0.25, 0.25)
    """
    by_device: dict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    stages = columns = parts = 0
    for operation in operations:
        stage, column, part = map(int, STAGE.findall(operation.name)[0])
        by_device[stage, column].append(operation)
        stages, columns, parts = max(stages, stage + 1), max(columns, column + 1), max(parts, part + 1)
    busy, total = 0.0, 0.0
    for step in steps:
        begin = origin + NANOSECONDS * step.begins
        end = begin + NANOSECONDS * step.duration
        spans = [[one[:2] for one in of_device if begin <= one.begin < end] for of_device in by_device.values()]
        together = Coverage(span for of_device in spans for span in of_device)
        if together.total:
            busy += sum(Coverage(of_device).total for of_device in spans)
            total += len(spans) * float(together.ends[-1] - together.begins[0])
    ideal = (stages - 1) / (-(-parts // columns) + stages - 1) if stages > 1 else 0.0
    return PipelineTime(stages, parts, bubble=1 - busy / total, ideal=ideal) if total else None
