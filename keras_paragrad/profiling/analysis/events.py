"""The events of a trace that make up a training step."""

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Marker:
    """A step marker.

    Attributes:
        begin, end: In nanoseconds.
        stats: The marker's metadata, as text.
        line: On which thread it is.
    """

    begin: float
    end: float
    stats: dict[str, Any]
    line: int


@dataclass(frozen=True)
class Pull:
    """A request for a batch from an iterator: when, in nanoseconds, and whether it returned one."""

    begin: float
    filled: bool


@dataclass(frozen=True)
class Work:
    """A thread's part in a function that another thread called.

    Attributes:
        begin, end: In nanoseconds.
        line: On which thread it is.
        flow: The call's number.
    """

    begin: float
    end: float
    line: int
    flow: str


@dataclass(frozen=True)
class TracedCall:
    """A function dispatched to other threads: when, in nanoseconds, on which thread, and the call's number."""

    begin: float
    line: int
    flow: str


@dataclass(frozen=True)
class Compiled:
    """An operation compiled by XLA and run on the CPU; its times are in nanoseconds."""

    name: str
    begin: float
    end: float
    line: int


class FunctionCall(NamedTuple):
    """A call of a `tf.function`.

    Attributes:
        begin, end: In nanoseconds.
        line: On which thread it is.
        traced: How often the function had been traced when it returned.
    """

    begin: float
    end: float
    line: int
    traced: int


class OfStage(NamedTuple):
    """An operation of a stage of a pipeline, or a run of what XLA compiled of it.

    Attributes:
        stage: Which stage, counted from 0.
        column: On which of the stage's devices.
        micro_batch: Of which micro-batch; not known yet, and 0, of a program.
        backward: Whether it is of the backward pass.
        begin, end: In nanoseconds.
        program: The number of what XLA compiled, which is the same for all micro-batches; empty for an operation.
    """

    stage: int
    column: int
    micro_batch: int
    backward: bool
    begin: float
    end: float
    program: str = ""


@dataclass
class Trace:
    """The events of a trace that make up a training step; spans are in nanoseconds.

    Attributes:
        markers: The steps.
        pulls: The batches.
        input: Waiting for batches.
        operations: Operations on the CPU.
        device: Operations on other devices.
        collective: Collectives with other replicas.
        host: By thread, what the host did, operations included.
        made_by_python: What an input pipeline runs in Python, as for a generator or a `PyDataset`.
        python_calls: By thread, calls from Python into TensorFlow.
        without_lock: By thread, what these calls did with Python's interpreter lock released.
        calls: Functions that were called.
        work: The parts of them that other threads ran.
        compiled: Operations compiled by XLA and run on the CPU.
        programs: Runs of programs that XLA compiled for the CPU: the program's number, and when.
        stages: Operations on the CPU that are of a stage of a pipeline, programs included.
        functions: Calls of a `tf.function`.
        graphs: When, and on which thread, Python began to build the graph of one.
        has_device: Whether there is a GPU or TPU.
    """

    markers: list[Marker] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    input: list[tuple[float, float]] = field(default_factory=list)
    operations: list[tuple[float, float]] = field(default_factory=list)
    device: list[tuple[float, float]] = field(default_factory=list)
    collective: list[tuple[float, float]] = field(default_factory=list)
    host: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    made_by_python: list[tuple[float, float]] = field(default_factory=list)
    python_calls: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    without_lock: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    calls: list[TracedCall] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    programs: list[tuple[str, tuple[float, float]]] = field(default_factory=list)
    stages: list[OfStage] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    graphs: list[tuple[float, int]] = field(default_factory=list)
    has_device: bool = False

    def compiling(self, line: int) -> list[FunctionCall]:
        """The calls on a thread in which a function was traced and compiled, without those within others of them."""
        found: list[FunctionCall] = []
        graphs = sorted(begin for begin, thread in self.graphs if thread == line)
        calls = [call for call in self.functions if call.line == line]
        for call in sorted(calls, key=lambda call: (call.begin, -call.end)):
            is_inner = bool(found) and call.begin < found[-1].end
            if not is_inner and bisect.bisect(graphs, call.end) > bisect.bisect_left(graphs, call.begin):
                found.append(call)
        return found
