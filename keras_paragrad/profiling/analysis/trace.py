"""Reads a trace file, and sorts its events by their role in a training step.

A plane of a trace is a device or the host, and a line of a plane is a thread, or a stream of a device.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from keras_paragrad.extras import require
from keras_paragrad.profiling.analysis.events import PYTHON_KINDS, Span, Trace, TraceEvent

TRACES = "*.xplane.pb"
# The profiler's device names, and the lines of a device that hold operations rather than what encloses them.
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_DEVICE_LINES = re.compile(r"Stream|XLA Ops")
_OPERATION = re.compile(r"[A-Za-z0-9.][\w.\\/>-]*:([A-Za-z_]\w*)$")
# `engine/pipeline` writes a stage, the column of its device and a micro-batch into names of operations.
STAGE = re.compile(r"pipeline_stage_(\d+)_column_(\d+)_micro_batch_(\d+)")
# While Python builds the graph of a `tf.function`.
_GRAPH = "tf.function-graph_building"
COLLECTIVE = re.compile(r"collective|nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter", re.IGNORECASE)
_COLLECTIVE_CALL, _COLLECTIVE_DONE = "CollectiveOpV2Kernel::Run", "CollectiveExecutor::ExecuteAsync::Done"
# Events that enclose a call, as in xprof; only the events inside count.
_ENCLOSING = ("EagerExecute", "EagerLocalExecute", "EagerKernelExecute", "end: ", "Threadpool")
# A flow links an event that dispatches work to another thread with the event that runs it there. Each has the flow's
# type and id in its statistics, under these names.
_PRODUCER, _CONSUMER = ("_pt", "_p"), ("_ct", "_c")
# The roles of events whose flow is read.
_FLOWS = {"calls": _PRODUCER, "work": _CONSUMER}
# A call from Python into TensorFlow, and its part that runs with the interpreter lock released.
_FROM_PYTHON, _LOCK_RELEASED = "TFE_Py_", "EagerExecute"
# The input pipeline's threads, which run concurrently with the step, and the ones among them that aren't read.
_PIPELINE_LINES, _UNREAD_LINES = "tf_data", "tf_data_iterator_resource"


class _Read(Protocol):
    """An event as xprof reads it."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Iterable[tuple[str, Any]]


def trace_files(folder: Path) -> list[Path]:
    """The trace files in a folder, one for each worker, by name."""
    files = sorted(folder.glob(TRACES))
    if not files:
        raise FileNotFoundError(f"There is no {TRACES} in {folder}. Pass the folder of one trace.")
    return files


def read_trace(file: Path) -> Trace:
    """Reads an `.xplane.pb` file."""
    require("Reading a trace", "xprof")
    from xprof.profile_data import ProfileData

    trace = Trace()
    for plane in ProfileData.from_file(str(file)).planes:
        if _DEVICE.search(plane.name):
            trace.has_device = True
            _read_device(trace, plane)
        elif plane.name.startswith("/host:CPU"):
            _read_host(trace, plane)
    return trace


def _read_device(trace: Trace, plane: Any) -> None:
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


def _read_host(trace: Trace, plane: Any) -> None:
    """Adds the events of the host's threads to the trace."""
    # By flow, when a collective is called, and when it is done.
    called: dict[str, float] = {}
    done: dict[str, float] = {}
    for number, line in enumerate(plane.lines):
        if line.name.startswith(_UNREAD_LINES):
            continue
        # Found once for each name, as reading an event's statistics is slow.
        known: dict[str, set[str]] = {}
        for event in line.events:
            if event.name not in known:
                known[event.name] = _roles(event, line.name.startswith(_PIPELINE_LINES))
            for role in known[event.name]:
                if role == "collective_call":
                    called[_flow(event, _PRODUCER)] = event.start_ns
                elif role == "collective_end":
                    done[_flow(event, _CONSUMER)] = _span(event)[1]
                else:
                    _add(trace, role, event, number)
    # A collective waits for other replicas from its call to its completion.
    trace.collective += [(begin, done[flow]) for flow, begin in called.items() if flow in done]


def _add(trace: Trace, role: str, event: _Read, line: int) -> None:
    """Adds an event on a line to the list of the trace that is named as its role."""
    found, span = getattr(trace, role), _span(event)
    if role in _FLOWS:
        found.append(TraceEvent(*span, line, flow=_flow(event, _FLOWS[role])))
    elif role in ("markers", "pulls", "functions", "graphs", "compiled", "stages"):
        # Reading statistics is slow.
        stats = dict(event.stats) if role in ("markers", "pulls", "functions") else {}
        # A call that failed, as at the end of data, lacks the statistic.
        if role != "functions" or "tracing_count" in stats:
            found.append(TraceEvent(*span, line, event.name, stats))
    elif role in ("host", "python_calls", "lock_released"):
        found[line].append(span)
    else:
        found.append(span)
    if role == "compiled":
        trace.operations.append(span)
    elif role in ("operations", "collective"):
        trace.runs[event.name] += 1


def _flow(event: _Read, names: tuple[str, str]) -> str:
    """The flow that an event starts or ends, as text; `names` are `_PRODUCER` or `_CONSUMER`."""
    stats = dict(event.stats)
    return ":".join(str(stats.get(name, "")) for name in names)


def _span(event: _Read) -> Span:
    return event.start_ns, event.start_ns + event.duration_ns


def _roles(event: _Read, in_pipeline: bool) -> set[str]:
    """The roles of an event, of which it may have none or several: lists of a `Trace`, and the ends of collectives.

    `in_pipeline`: whether a thread of the input pipeline runs it.
    """
    if event.name == _LOCK_RELEASED:
        return {"lock_released"}
    if event.name.startswith(_ENCLOSING):
        return set()
    if event.name == "FunctionRun":
        return {"calls"}
    if event.name == _GRAPH:
        return {"host", "graphs"}
    stats = {key for key, _ in event.stats}
    roles = _main_roles(event.name, stats)
    if "markers" in roles:
        return roles
    if event.name.startswith(_FROM_PYTHON):
        return {"host", "python_calls"}
    operation = _OPERATION.match(event.name)
    if operation and operation[1] in PYTHON_KINDS:
        if in_pipeline:
            return {"host", "python_input"}
        roles.add("python")
    if _PRODUCER[1] in stats:
        roles.add("calls")
    if _CONSUMER[1] in stats:
        roles.add("work")
    if "operations" in roles and STAGE.search(event.name):
        roles.add("stages")
    return roles | {"host"}


def _main_roles(name: str, stats: set[str]) -> set[str]:
    """What an event is by its name and the names of its statistics."""
    if name.startswith("IteratorGetNext"):
        return {"input", "pulls"} if "::DoCompute" in name else {"input"}
    if name in (_COLLECTIVE_CALL, _COLLECTIVE_DONE):
        return {"collective_call" if name == _COLLECTIVE_CALL else "collective_end"}
    operation = _OPERATION.match(name)
    if operation:
        return {"collective" if COLLECTIVE.match(operation[1]) else "operations"}
    if "hlo_op" in stats:
        return {"collective" if COLLECTIVE.match(name) else "compiled"}
    if "tracing_count" in stats:
        return {"functions"}
    return {"markers"} if "batch" in stats or {"step_num", "_r"} <= stats else set()
