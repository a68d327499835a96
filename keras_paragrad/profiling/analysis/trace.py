"""Reads a trace file, and sorts its events by their role in a training step.

A plane of a trace is a device or the host, and a line of a plane is a thread, or a stream of a device.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from keras_paragrad.extras import require
from keras_paragrad.profiling.analysis.events import (
    PYTHON_KINDS,
    Compiled,
    FunctionCall,
    Marker,
    Pull,
    Span,
    StageOperation,
    Trace,
    TracedCall,
    Work,
)

TRACES = "*.xplane.pb"
# The profiler's device names, and the lines of a device that hold operations rather than what encloses them.
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_DEVICE_LINES = re.compile(r"Stream|XLA Ops")
_OPERATION = re.compile(r"[A-Za-z0-9.][\w.\\/>-]*:([A-Za-z_]\w*)$")
# `engine/pipeline` writes this into the names of a pipeline's operations, and of the functions that XLA compiles.
_STAGE = re.compile(r"pipeline_stage_(\d+)_column_(\d+)(?:_micro_batch_(\d+))?")
_BACKWARD, _COMPILED_BACKWARD = "gradient_tape/", "__backward_"
# XLA's run of a program, around its operations, whose statistic has the program's id.
_RUN, _PROGRAM = "CpuExecutable::ExecuteAsyncOnStream", "program_id"
# While Python builds the graph of a `tf.function`.
_GRAPH = "tf.function-graph_building"
COLLECTIVE = re.compile(r"collective|nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter", re.IGNORECASE)
_COLLECTIVE_CALL, _COLLECTIVE_DONE = "CollectiveOpV2Kernel::Run", "CollectiveExecutor::ExecuteAsync::Done"
# Events that enclose a call, as in xprof; only the events inside count.
_ENCLOSING = ("EagerExecute", "EagerLocalExecute", "EagerKernelExecute", "end: ", "Threadpool")
# A flow links an event that dispatches work to another thread with the event that runs it there. Each has the flow's
# type and id in its statistics, under these names.
_PRODUCER, _CONSUMER = ("_pt", "_p"), ("_ct", "_c")
# A call from Python into TensorFlow, and its part that runs with the interpreter lock released.
_FROM_PYTHON, _LOCK_RELEASED = "TFE_Py_", "EagerExecute"
# The input pipeline's threads, which run concurrently with the step, and the ones among them that aren't read.
_PIPELINE_LINES, _UNREAD_LINES = "tf_data", "tf_data_iterator_resource"


class _Event(Protocol):
    """An event as xprof reads it."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Iterable[tuple[str, Any]]


class _Line(Protocol):
    name: str
    events: Iterable[_Event]


class _Plane(Protocol):
    name: str
    lines: Iterable[_Line]


def trace_files(folder: Path) -> list[Path]:
    """The trace files in a folder, one for each worker, by name.

    Raises:
        FileNotFoundError: There is none.
    """
    files = sorted(folder.glob(TRACES))
    if not files:
        raise FileNotFoundError(f"There is no {TRACES} in {folder}. Pass the folder of one trace.")
    return files


def read_trace(file: Path) -> Trace:
    """Reads an `.xplane.pb` file.

    Raises:
        MissingExtraError: xprof is not installed.
    """
    require("Reading a trace", "xprof")
    from xprof.profile_data import ProfileData

    trace = Trace()
    for plane in ProfileData.from_file(str(file)).planes:
        if _DEVICE.search(plane.name):
            trace.has_device = True
            _read_device(trace, plane)
        elif plane.name.startswith("/host:CPU"):
            _read_host(trace, plane)
    if trace.programs:
        _add_compiled_stages(trace, file)
    return trace


def _add_compiled_stages(trace: Trace, file: Path) -> None:
    """Adds the runs of XLA's programs that are stages of a pipeline, by the programs' names."""
    from keras_paragrad.engine.pipeline.compiled import program_names

    names = program_names(file)
    for program, span in trace.programs:
        name = names.get(program, "")
        if match := _STAGE.search(name):
            stage, column, _ = match.groups()
            trace.stages.append(
                StageOperation(int(stage), int(column), 0, _COMPILED_BACKWARD in name, *span, program=program)
            )


def _read_device(trace: Trace, plane: _Plane) -> None:
    """Adds the operations of a GPU or TPU to the trace."""
    for line in plane.lines:
        if not _DEVICE_LINES.search(line.name):
            continue
        for event in line.events:
            if COLLECTIVE.search(event.name):
                trace.collective.append(_span(event))
                trace.device_collectives[plane.name].append(_span(event))
            else:
                trace.device.append(_span(event))
                trace.device_compute[plane.name].append(_span(event))


def _read_host(trace: Trace, plane: _Plane) -> None:
    """Adds the events of the host's threads to the trace."""
    reader = _HostReader(trace)
    for number, line in enumerate(plane.lines):
        if not line.name.startswith(_UNREAD_LINES):
            reader.read(line, number)
    # A collective waits for other replicas from its call to its completion.
    called, done = reader.collective_calls, reader.collective_ends
    trace.collective += [(begin, done[flow]) for flow, begin in called.items() if flow in done]


class _HostReader:
    """Adds the events of the host's threads to a trace.

    It has a method for each kind of event, which gets an event, its span, and the number of its line.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.collective_calls: dict[str, float] = {}
        self.collective_ends: dict[str, float] = {}
        # By thread, a run of a program whose id isn't known yet.
        self._running: dict[int, Span] = {}

    def read(self, line: _Line, number: int) -> None:
        """Adds the events of the line with this number."""
        for kinds, event in _classified_events(line):
            span = _span(event)
            for kind in kinds:
                kind(self, event, span, number)

    def marker(self, event: _Event, span: Span, line: int) -> None:
        self.trace.markers.append(Marker(*span, dict(event.stats), line))

    def call(self, event: _Event, span: Span, line: int) -> None:
        self.trace.calls.append(TracedCall(span[0], line, _flow(event, _PRODUCER)))

    def work(self, event: _Event, span: Span, line: int) -> None:
        self.trace.work.append(Work(*span, line, _flow(event, _CONSUMER)))

    def collective_call(self, event: _Event, span: Span, line: int) -> None:
        self.collective_calls[_flow(event, _PRODUCER)] = span[0]

    def collective_end(self, event: _Event, span: Span, line: int) -> None:
        self.collective_ends[_flow(event, _CONSUMER)] = span[1]

    def input(self, event: _Event, span: Span, line: int) -> None:
        self.trace.input.append(span)
        if "::DoCompute" in event.name:
            self.trace.pulls.append(Pull(span[0], "element_size" in dict(event.stats)))

    def compiled(self, event: _Event, span: Span, line: int) -> None:
        self.trace.operations.append(span)
        self.trace.compiled.append(Compiled(event.name, *span, line))
        if (run := self._running.pop(line, None)) and span[0] < run[1]:
            self.trace.programs.append((str(dict(event.stats).get(_PROGRAM)), run))

    def run(self, event: _Event, span: Span, line: int) -> None:
        self._running[line] = span

    def function(self, event: _Event, span: Span, line: int) -> None:
        traced = dict(event.stats).get("tracing_count")
        # A call that failed, as at the end of data, lacks the statistic.
        if traced is not None:
            self.trace.functions.append(FunctionCall(*span, line, int(traced)))

    def graph(self, event: _Event, span: Span, line: int) -> None:
        self.trace.graphs.append((span[0], line))

    def python_call(self, event: _Event, span: Span, line: int) -> None:
        self.trace.python_calls[line].append(span)

    def lock_released(self, event: _Event, span: Span, line: int) -> None:
        self.trace.lock_released[line].append(span)

    def python_input(self, event: _Event, span: Span, line: int) -> None:
        self.trace.python_input.append(span)

    def python(self, event: _Event, span: Span, line: int) -> None:
        self.trace.python.append(span)

    def stage(self, event: _Event, span: Span, line: int) -> None:
        match = _STAGE.search(event.name)
        assert match is not None
        stage, column, micro_batch = map(int, match.groups())
        self.trace.stages.append(StageOperation(stage, column, micro_batch, event.name.startswith(_BACKWARD), *span))

    def operation(self, event: _Event, span: Span, line: int) -> None:
        self.trace.operations.append(span)
        self.trace.runs[event.name] += 1

    def collective(self, event: _Event, span: Span, line: int) -> None:
        self.trace.collective.append(span)
        self.trace.runs[event.name] += 1

    def host(self, event: _Event, span: Span, line: int) -> None:
        self.trace.host[line].append(span)


# A kind of event: the method that adds it.
Kind = Callable[[_HostReader, _Event, Span, int], None]


def _flow(event: _Event, names: tuple[str, str]) -> str:
    """The flow that an event starts or ends, as text; `names` are `_PRODUCER` or `_CONSUMER`."""
    stats = dict(event.stats)
    return ":".join(str(stats.get(name, "")) for name in names)


def _span(event: _Event) -> Span:
    return event.start_ns, event.start_ns + event.duration_ns


def _classified_events(line: _Line) -> Iterator[tuple[tuple[Kind, ...], _Event]]:
    """A line's events with their kinds, determined once per name, as reading an event's statistics is slow."""
    kinds_by_name: dict[str, tuple[Kind, ...]] = {}
    for event in line.events:
        kinds = kinds_by_name.get(event.name)
        if kinds is None:
            kinds = kinds_by_name[event.name] = _kinds(event, line.name.startswith(_PIPELINE_LINES))
        if kinds:
            yield kinds, event


def _kinds(event: _Event, in_pipeline: bool) -> tuple[Kind, ...]:
    """The kinds of an event: none if it is left out, and several if it plays several roles.

    `in_pipeline`: whether a thread of the input pipeline runs it.
    """
    if event.name == _LOCK_RELEASED:
        return (_HostReader.lock_released,)
    if event.name.startswith(_ENCLOSING):
        return ()
    if event.name == "FunctionRun":
        return (_HostReader.call,)
    if event.name == _GRAPH:
        return (_HostReader.host, _HostReader.graph)
    if event.name == _RUN:
        return (_HostReader.host, _HostReader.run)
    stats = {key for key, _ in event.stats}
    kind = _kind(event.name, stats)
    if kind is _HostReader.marker:
        return (kind,)
    if event.name.startswith(_FROM_PYTHON):
        return (_HostReader.host, _HostReader.python_call)
    kinds = {kind, _HostReader.host}
    operation = _OPERATION.match(event.name)
    if operation and operation[1] in PYTHON_KINDS:
        if in_pipeline:
            return (_HostReader.host, _HostReader.python_input)
        kinds.add(_HostReader.python)
    if _PRODUCER[1] in stats:
        kinds.add(_HostReader.call)
    if _CONSUMER[1] in stats:
        kinds.add(_HostReader.work)
    if kind is _HostReader.operation and _STAGE.search(event.name):
        kinds.add(_HostReader.stage)
    return tuple(kinds)


def _kind(name: str, stats: set[str]) -> Kind:
    """The main kind of an event, by its name and the names of its statistics."""
    if name.startswith("IteratorGetNext"):
        return _HostReader.input
    if name in (_COLLECTIVE_CALL, _COLLECTIVE_DONE):
        return _HostReader.collective_call if name == _COLLECTIVE_CALL else _HostReader.collective_end
    operation = _OPERATION.match(name)
    if operation:
        return _HostReader.collective if COLLECTIVE.match(operation[1]) else _HostReader.operation
    if "hlo_op" in stats:
        return _HostReader.collective if COLLECTIVE.match(name) else _HostReader.compiled
    if "tracing_count" in stats:
        return _HostReader.function
    return _HostReader.marker if "batch" in stats or {"step_num", "_r"} <= stats else _HostReader.host
