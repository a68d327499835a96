"""`summarize`: reads a trace, and computes where the time of each step went."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from keras_paragrad.compat.trace_files import write_events_within
from keras_paragrad.profiling.analysis.advice import advise
from keras_paragrad.profiling.analysis.communication import communication
from keras_paragrad.profiling.analysis.events import Trace
from keras_paragrad.profiling.analysis.evidence import Evidence
from keras_paragrad.profiling.analysis.layers import kind_times, layer_times
from keras_paragrad.profiling.analysis.memory import memory_use
from keras_paragrad.profiling.analysis.operations import (
    Operation,
    compiled_operations,
    longest_operations,
    xprof_operations,
)
from keras_paragrad.profiling.analysis.steps import begin_of, pipeline_time, step_times, training_spans
from keras_paragrad.profiling.analysis.trace import read_trace, trace_files
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo

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
    if (spans := training_spans(events)) is None:
        return _summarize(folder, file, events, run, layers, peak_memory)
    with tempfile.TemporaryDirectory() as copies:
        # xprof's tables are of whole files, so it gets one without the events between training steps.
        copy = Path(copies, file.name)
        write_events_within(file, copy, spans)
        return _summarize(folder, copy, read_trace(copy), run, layers, peak_memory)


def _summarize(
    folder: Path,
    file: Path,
    events: Trace,
    run: RunInfo,
    layers: Collection[str],
    peak_memory: Mapping[str, int | None] | None,
) -> ProfileSummary:
    """Summarizes the events of a file, a trace in `folder` or a copy of one without pauses of training."""
    steps = step_times(events)
    operations = [*xprof_operations(file, events.runs), *compiled_operations(events.compiled)]
    longest = longest_operations(operations, layers)
    by_layer, collectives = layer_times(operations, layers, run.optimizer), communication(events)
    # A stage's operations on the host don't show what its GPU does.
    pipeline = None if events.has_device else pipeline_time(events.stages, steps, begin_of(events))
    return ProfileSummary(
        run=run,
        steps=steps,
        operations=longest,
        layers=by_layer,
        kinds=kind_times(operations),
        communication=collectives,
        memory=memory_use(file, steps, begin_of(events)),
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
    elif events.stages:
        notes.append("The stages of a pipeline are shown on CPUs only: they were never measured on other devices.")
    if events.compiled:
        notes.append("Operations compiled by XLA have no layer: the trace doesn't record it.")
    if not operations:
        notes.append("This trace has no operations.")
    return notes
