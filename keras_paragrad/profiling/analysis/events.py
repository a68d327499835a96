"""The events of a trace that make up a training step, in nanoseconds, and the time that they cover.

A line of a trace is a thread. A flow is an id that links a call to the work that other threads do for it.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

Span = tuple[float, float]
# Per millisecond.
NANOSECONDS = 1e6
# The operations that call Python code.
PYTHON_KINDS = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


class TraceEvent(NamedTuple):
    """An event on a line.

    Attributes:
        begin, end: When it begins and ends.
        line: The number of its line.
        name: Its name.
        stats: Its metadata by name, where they are read.
        flow: The flow that it starts or ends.
    """

    begin: float
    end: float
    line: int = 0
    name: str = ""
    stats: Mapping[str, Any] = MappingProxyType({})
    flow: str = ""


@dataclass
class Trace:
    """The events of a trace that make up a training step."""

    # Step markers, requests for batches, which have an `element_size` if there was one, and waiting for these.
    markers: list[TraceEvent] = field(default_factory=list)
    pulls: list[TraceEvent] = field(default_factory=list)
    input: list[Span] = field(default_factory=list)
    # Operations on the CPU and on other devices, collectives, and of each device both.
    operations: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    collective: list[Span] = field(default_factory=list)
    device_compute: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    device_collectives: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    # How often operations of the host ran, by name and kind.
    runs: Counter[str] = field(default_factory=Counter)
    # All work of the host, with operations, by thread.
    host: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    # Python code of an input pipeline, as of a generator or a `PyDataset`, and of operations, as `tf.numpy_function`.
    python_input: list[Span] = field(default_factory=list)
    python: list[Span] = field(default_factory=list)
    # By thread, calls from Python into TensorFlow, and their parts that run with Python's interpreter lock released.
    python_calls: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    lock_released: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    # Functions that were dispatched to other threads, and the parts of them that these ran.
    calls: list[TraceEvent] = field(default_factory=list)
    work: list[TraceEvent] = field(default_factory=list)
    # Operations that XLA compiled, on the CPU, and those of a pipeline's stages.
    compiled: list[TraceEvent] = field(default_factory=list)
    stages: list[TraceEvent] = field(default_factory=list)
    # Calls of a `tf.function`, with the `tracing_count` at their end; and when Python builds the graph of one.
    functions: list[TraceEvent] = field(default_factory=list)
    graphs: list[TraceEvent] = field(default_factory=list)
    has_device: bool = False

    @property
    def steps(self) -> list[TraceEvent]:
        """The markers of batches in order; without any, the markers of steps."""
        batches = [marker for marker in self.markers if "batch" in marker.stats]
        return sorted(batches or self.markers, key=lambda marker: marker.begin)

    @property
    def begin(self) -> float:
        """When the first step begins, in nanoseconds."""
        return min((marker.begin for marker in self.steps), default=0.0)

    def compiling(self, line: int) -> list[TraceEvent]:
        """The outermost calls on a thread in which a function was traced and compiled."""
        compiling: list[TraceEvent] = []
        graphs = sorted(graph.begin for graph in self.graphs if graph.line == line)
        calls = [call for call in self.functions if call.line == line]
        for call in sorted(calls, key=lambda call: (call.begin, -call.end)):
            is_inner = bool(compiling) and call.begin < compiling[-1].end
            # A function is traced in a call within which Python begins to build a graph.
            if not is_inner and bisect.bisect(graphs, call.end) > bisect.bisect_left(graphs, call.begin):
                compiling.append(call)
        return compiling


class Coverage:
    """The time that spans cover, counted once where they overlap."""

    def __init__(self, spans: Iterable[Sequence[float]]):
        ordered = np.array(sorted((begin, end) for begin, end in spans if end > begin), dtype="float64").reshape(-1, 2)
        begins, ends = ordered[:, 0], np.maximum.accumulate(ordered[:, 1]) if len(ordered) else ordered[:, 1]
        # Merge overlapping spans: one starts where all earlier ones have ended.
        starts = np.concatenate([[True], begins[1:] > ends[:-1]])[: len(ordered)]
        self.begins = begins[starts]
        self.ends = ends[np.concatenate([starts[1:], [True]])[: len(ordered)]]
        self._sums = np.concatenate([[0.0], np.cumsum(self.ends - self.begins)])

    def within(self, begin: float, end: float) -> float:
        """How much of the time from `begin` to `end` is covered."""
        return float(self._until(end) - self._until(begin))

    @property
    def total(self) -> float:
        """All of the time that is covered."""
        return float(self._sums[-1])

    def __or__(self, other: "Coverage") -> "Coverage":
        return Coverage([*self.spans(), *other.spans()])

    def __and__(self, other: "Coverage") -> "Coverage":
        spans, mine, yours = [], 0, 0
        while mine < len(self.begins) and yours < len(other.begins):
            begin = max(self.begins[mine], other.begins[yours])
            end = min(self.ends[mine], other.ends[yours])
            if begin < end:
                spans.append((begin, end))
            if self.ends[mine] < other.ends[yours]:
                mine += 1
            else:
                yours += 1
        return Coverage(spans)

    def spans(self) -> Iterable[Span]:
        return zip(self.begins, self.ends, strict=True)

    def _until(self, moment: float) -> float:
        """How much is covered before a moment."""
        index = int(np.searchsorted(self.begins, moment, side="right"))
        beyond = max(self.ends[index - 1] - moment, 0.0) if index else 0.0
        return self._sums[index] - beyond
