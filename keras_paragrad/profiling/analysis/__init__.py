"""`summarize`: reads a trace, and computes where the time of each step went."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from keras_paragrad.profiling.analysis.advice import Evidence, advise
from keras_paragrad.profiling.analysis.events import NANOSECONDS, Trace
from keras_paragrad.profiling.analysis.operations import (
    Operation,
    compiled_operations,
    kind_times,
    layer_times,
    longest_operations,
    xprof_operations,
    xprof_tool,
)
from keras_paragrad.profiling.analysis.steps import communication, pipeline_time, step_times
from keras_paragrad.profiling.analysis.trace import read_trace, trace_files
from keras_paragrad.profiling.summary import MemoryUse, ProfileSummary, RunInfo, StepTime

_UNKNOWN = RunInfo()


def summarize(
    trace: Path,
    *,
    run: RunInfo = _UNKNOWN,
    layers: Collection[str] = (),
    peak_memory: Mapping[str, int | None] | None = None,
) -> ProfileSummary:
    """Summarizes a trace, ours or another program's.

    Args:
        trace: The folder of one trace. If there are files of several workers in it, the first is read.
        run: The run.
        layers: The names of the model's layers, to which operations are assigned; a mapping has their classes.
        peak_memory: Peak memory in bytes, by device.

    Raises:
        FileNotFoundError: There is no trace in the folder.
        MissingExtraError: xprof is not installed.
    """
    folder = Path(trace)
    file = trace_files(folder)[0]
    events = read_trace(file)
    steps = step_times(events)
    operations = [*xprof_operations(file, events.runs), *compiled_operations(events.compiled)]
    longest = longest_operations(operations, layers)
    by_layer, collectives = layer_times(operations, layers, run.optimizer), communication(events)
    # A stage's operations on the host don't show what its GPU does, nor what XLA compiled.
    hidden = events.has_device or events.compiled
    pipeline = None if hidden else pipeline_time(events.stages, steps, events.begin)
    return ProfileSummary(
        run=run,
        steps=steps,
        operations=longest,
        layers=by_layer,
        kinds=kind_times(operations),
        communication=collectives,
        memory=_memory_use(file, steps, events.begin),
        peak_memory=dict(peak_memory or {}),
        advice=advise(Evidence(steps, longest, run, events, operations, by_layer, collectives, pipeline)),
        # From `plugins` on, as in a log directory.
        trace="/".join(folder.parts[folder.parts.index("plugins") :]) if "plugins" in folder.parts else folder.name,
        notes=tuple(_notes(events, len(steps), operations)),
        pipeline=pipeline,
    )


def _notes(events: Trace, steps: int, operations: list[Operation]) -> list[str]:
    """Notes on the trace for readers of the summary."""
    notes = []
    if not steps:
        notes.append("This trace has no step markers. Train with callbacks=[Profiler(log_dir)] to get them.")
    if any(int(marker.stats.get("count", 1)) > 1 for marker in events.markers):
        notes.append("TensorBoard shows no steps where a call runs several batches; these are from the trace itself.")
    if not events.has_device:
        notes.append("There is no GPU or TPU in this trace: compute ran on the host's CPUs.")
    if events.stages and (events.has_device or events.compiled):
        notes.append("The stages of a pipeline are shown on CPUs only, and where XLA doesn't compile them.")
    if events.compiled:
        notes.append("Operations compiled by XLA have no layer: the trace doesn't record it.")
    if not operations:
        notes.append("This trace has no operations.")
    return notes


def _memory_use(file: Path, steps: Sequence[StepTime], origin: float) -> tuple[MemoryUse, ...]:
    """The memory of each allocator by xprof's `memory_profile`, which keeps the largest of a thousand values.

    TensorFlow's allocators for GPUs, and for the large tensors of CPUs with oneDNN, record what they hold.
    """
    profile = xprof_tool(file, "memory_profile") if steps else None
    uses = []
    for name, memory in (profile or {}).get("memoryProfilePerAllocator", {}).items():
        snapshots = memory.get("sampledTimelineSnapshots", [])
        # In milliseconds after the first step's start.
        times = (np.array([float(one["timeOffsetPs"]) / 1e3 for one in snapshots]) - origin) / NANOSECONDS
        held = np.array([float(one["aggregationStats"]["heapAllocatedBytes"]) for one in snapshots])
        begins, durations, numbers = np.array([(one.begins, one.duration, one.step) for one in steps]).T
        indices = np.clip(np.searchsorted(begins, times, side="right") - 1, 0, None)
        fractions = (times - begins[indices]) / durations[indices]
        inside = (fractions >= 0) & (fractions < 1)
        if inside.any():
            batches = np.round(numbers[indices] + fractions, 4)
            uses.append(MemoryUse(name, tuple(batches[inside].tolist()), tuple(held[inside].tolist())))
    return tuple(uses)
