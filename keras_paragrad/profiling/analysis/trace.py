"""Reads a trace file, and sorts its events by their role in a training step."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_paragrad.extras import require
from keras_paragrad.profiling.analysis.events import (
    Compiled,
    FunctionCall,
    Marker,
    OfStage,
    Pull,
    Trace,
    TracedCall,
    Work,
)

TRACES = "*.xplane.pb"
# The profiler's device names, and a device's lines that hold what ran rather than what it was part of.
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_DEVICE_LINES = re.compile(r"Stream|XLA Ops")
_OPERATION = re.compile(r"[A-Za-z0-9.][\w.\\/>-]*:([A-Za-z_]\w*)$")
# What `engine/pipeline/on_device.py` writes into the names of a pipeline's operations, and of what XLA compiles.
_STAGE = re.compile(r"pipeline_stage_(\d+)_column_(\d+)(?:_micro_batch_(\d+))?")
_BACKWARD, _COMPILED_BACKWARD = "gradient_tape/", "__backward_"
# A program's run by XLA, around its operations, whose statistic tells which program it is.
_RUN, _PROGRAM = "CpuExecutable::ExecuteAsyncOnStream", "program_id"
# While Python builds the graph of a `tf.function`.
_GRAPH = "tf.function-graph_building"
_COLLECTIVE = re.compile(r"collective|nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter", re.IGNORECASE)
_COLLECTIVE_CALL, _COLLECTIVE_DONE = "CollectiveOpV2Kernel::Run", "CollectiveExecutor::ExecuteAsync::Done"
# Events that enclose a call, as in xprof; only their inside counts.
_AROUND = ("EagerExecute", "EagerLocalExecute", "EagerKernelExecute", "end: ")
# Statistics of events that dispatch work to other threads, and of those that pick it up: the type and the id.
_HANDS_ON, _TAKES_UP = ("_pt", "_p"), ("_ct", "_c")
# A call from Python into TensorFlow, and what runs in it with the interpreter lock released.
_FROM_PYTHON, _WITHOUT_LOCK = "TFE_Py_", "EagerExecute"
# The input pipeline's own functions, which run concurrently with the step.
_OF_THE_PIPELINE = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_PIPELINE_LINES = ("tf_data_iterator_resource",)


def trace_files(folder: Path) -> list[Path]:
    """The trace files in a folder, in order of their names: one for each worker.

    Raises:
        FileNotFoundError: There is none.
    """
    found = sorted(folder.glob(TRACES))
    if not found:
        raise FileNotFoundError(f"There is no {TRACES} in {folder}. Pass the folder of one trace.")
    return found


def read_trace(file: Path) -> Trace:
    """Reads a trace file.

    Args:
        file: An `.xplane.pb`.

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
    from keras_paragrad.engine.pipeline.programs import program_names

    names = program_names(file)
    for program, span in trace.programs:
        name = names.get(program, "")
        if found := _STAGE.search(name):
            stage, column, _ = found.groups()
            trace.stages.append(OfStage(int(stage), int(column), 0, _COMPILED_BACKWARD in name, *span, program))


def _read_device(trace: Trace, plane: Any) -> None:
    for line in plane.lines:
        if not _DEVICE_LINES.search(line.name):
            continue
        for event in line.events:
            spans = trace.collective if _COLLECTIVE.search(event.name) else trace.device
            spans.append(_span(event))


def _read_host(trace: Trace, plane: Any) -> None:
    waits = _Waits()
    for number, line in enumerate(plane.lines):
        if line.name.startswith(_PIPELINE_LINES):
            continue
        for kinds, event in _told_apart(line):
            span = _span(event)
            for kind in kinds:
                _KEEP[kind](trace, waits, event, span, number)
    trace.collective += waits.spans()


class _Waits:
    """Collectives, from call to completion: in between they wait for other replicas.

    And, by thread, runs of programs whose number is not known yet.
    """

    def __init__(self):
        self.called: dict[str, float] = {}
        self.done: dict[str, float] = {}
        self.running: dict[int, tuple[float, float]] = {}

    def spans(self) -> list[tuple[float, float]]:
        return [(begin, self.done[flow]) for flow, begin in self.called.items() if flow in self.done]


def _keep_marker(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.markers.append(Marker(*span, dict(event.stats), line))


def _keep_call(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.calls.append(TracedCall(span[0], line, _flow(event, _HANDS_ON)))


def _keep_work(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.work.append(Work(*span, line, _flow(event, _TAKES_UP)))


def _keep_collective_call(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    waits.called[_flow(event, _HANDS_ON)] = span[0]


def _keep_collective_done(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    waits.done[_flow(event, _TAKES_UP)] = span[1]


def _keep_input(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.input.append(span)
    if "::DoCompute" in event.name:
        trace.pulls.append(Pull(span[0], "element_size" in dict(event.stats)))


def _keep_compiled(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.operations.append(span)
    trace.compiled.append(Compiled(event.name, *span, line))
    if (run := waits.running.pop(line, None)) and span[0] < run[1]:
        trace.programs.append((str(dict(event.stats).get(_PROGRAM)), run))


def _keep_run(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    waits.running[line] = span


def _keep_function(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    traced = dict(event.stats).get("tracing_count")
    # A call that failed, as at the end of data, lacks the statistic.
    if traced is not None:
        trace.functions.append(FunctionCall(*span, line, int(traced)))


def _keep_python_call(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.python_calls[line].append(span)


def _keep_stage(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    found = _STAGE.search(event.name)
    assert found is not None
    stage, column, micro_batch = map(int, found.groups())
    trace.stages.append(OfStage(stage, column, micro_batch, event.name.startswith(_BACKWARD), *span))


def _keep_without_lock(trace: Trace, waits: _Waits, event: Any, span: tuple[float, float], line: int) -> None:
    trace.without_lock[line].append(span)


_KEEP = {
    "marker": _keep_marker,
    "call": _keep_call,
    "work": _keep_work,
    "collective call": _keep_collective_call,
    "collective done": _keep_collective_done,
    "input": _keep_input,
    "compiled": _keep_compiled,
    "run": _keep_run,
    "function": _keep_function,
    "graph": lambda trace, waits, event, span, line: trace.graphs.append((span[0], line)),
    "python call": _keep_python_call,
    "stage": _keep_stage,
    "without lock": _keep_without_lock,
    "made by Python": lambda trace, waits, event, span, line: trace.made_by_python.append(span),
    "operations": lambda trace, waits, event, span, line: trace.operations.append(span),
    "collective": lambda trace, waits, event, span, line: trace.collective.append(span),
    "host": lambda trace, waits, event, span, line: trace.host[line].append(span),
}


def _flow(event: Any, named: tuple[str, str]) -> str:
    stats = dict(event.stats)
    return ":".join(str(stats.get(name, "")) for name in named)


def _span(event: Any) -> tuple[float, float]:
    return event.start_ns, event.start_ns + event.duration_ns


def _told_apart(line: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A line's events with their kinds, determined once per name, since reading an event's statistics is slow."""
    found: dict[str, tuple[str, ...]] = {}
    for event in line.events:
        kinds = found.get(event.name)
        if kinds is None:
            kinds = found[event.name] = _kinds(event)
        if kinds:
            yield kinds, event


def _kinds(event: Any) -> tuple[str, ...]:
    if event.name == _WITHOUT_LOCK:
        return ("without lock",)
    if event.name.startswith(_AROUND) or event.name.startswith("Threadpool"):
        return ()
    if event.name == "FunctionRun":
        return ("call",)
    if event.name == _GRAPH:
        return ("host", "graph")
    if event.name == _RUN:
        return ("host", "run")
    stats = {key for key, _ in event.stats}
    kind = _kind(event.name, stats)
    if kind == "marker":
        return (kind,)
    if event.name.startswith(_FROM_PYTHON):
        return ("host", "python call")
    operation = _OPERATION.match(event.name)
    if operation and operation[1] in _OF_THE_PIPELINE:
        return ("host", "made by Python")
    flows = [each for each, named in (("call", _HANDS_ON), ("work", _TAKES_UP)) if named[1] in stats]
    staged = ["stage"] if kind == "operations" and _STAGE.search(event.name) else []
    return tuple({kind, "host", *flows, *staged})


def _kind(name: str, stats: set[str]) -> str:
    if name.startswith("IteratorGetNext"):
        return "input"
    if name in (_COLLECTIVE_CALL, _COLLECTIVE_DONE):
        return "collective call" if name == _COLLECTIVE_CALL else "collective done"
    operation = _OPERATION.match(name)
    if operation:
        return "collective" if _COLLECTIVE.match(operation[1]) else "operations"
    if "hlo_op" in stats:
        return "collective" if _COLLECTIVE.match(name) else "compiled"
    if "tracing_count" in stats:
        return "function"
    return "marker" if "batch" in stats or {"step_num", "_r"} <= stats else "host"
