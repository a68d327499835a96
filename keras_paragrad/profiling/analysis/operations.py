"""The operations of a trace: the longest, the times of layers and kinds, and the stages of the input pipeline."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_paragrad.profiling.analysis.events import NANOSECONDS, PYTHON_KINDS, TraceEvent
from keras_paragrad.profiling.analysis.trace import COLLECTIVE
from keras_paragrad.profiling.summary import (
    COLLECTIVES,
    LOSS,
    OPTIMIZER,
    VARIANT,
    KindTime,
    LayerTime,
    OperationTime,
)

MOST = 50
# Stages that only wait for others.
_WAITING_STAGES = ("Prefetch", "Root")
_NUMBERED_SCOPE = re.compile(r"(.+)_\d+$")
# Scopes in operations' names: TensorFlow's for gradients, `engine/calls/recomputed.py`'s, and Keras's for losses and
# optimizers.
_BACKWARD = ("gradient_tape", "gradients")
_RECOMPUTED = re.compile(r"second_run(_\d+)?")
_LOSS = "compile_loss"
_UPDATE = re.compile(r"update_\d+(_\d+)*")
_NUMBER = re.compile(r"_\d+$")
_REST = "no layer named"


class Operation(NamedTuple):
    """An operation: how often it ran, its self time in all in milliseconds, and whether it ran on a GPU or TPU."""

    name: str
    kind: str
    times: int
    milliseconds: float
    on_device: bool


def xprof_operations(file: Path, runs: Mapping[str, int]) -> list[Operation]:
    """The operations in an `.xplane.pb` file by xprof's `framework_op_stats`, without its row for idle time."""
    table, operations = (xprof_tool(file, "framework_op_stats") or [{"cols": [], "rows": []}])[0], []
    # By name, as the columns differ between versions.
    names = [column["id"] for column in table["cols"]]
    for cells in table["rows"]:
        row = dict(zip(names, (cell["v"] for cell in cells["c"]), strict=False))
        name, kind = str(row["operation"]), str(row["type"])
        # Only steps' calls of Python are among the runs, not the input pipeline's.
        if kind != "IDLE" and (kind not in PYTHON_KINDS or f"{name}:{kind}" in runs):
            # xprof counts an operation twice that the host's thread pool shares.
            times = runs.get(f"{name}:{kind}", int(row["occurrences"]))
            milliseconds, on_device = float(row["total_self_time"]) * 1e-3, row["host_or_device"] == "Device"
            operations.append(Operation(name, kind, times, milliseconds, on_device))
    return operations


def xprof_tool(file: Path, tool: str) -> Any:
    """The output of one of xprof's tools for an `.xplane.pb` file; `None` if it is empty."""
    from xprof.convert.raw_to_tool_data import xspace_to_tool_data

    # xprof caches its results by folder, and would return one file's results for all files in it.
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, file.name)
        link.symlink_to(file.resolve())
        output = xspace_to_tool_data([str(link)], tool, {})[0]
    return json.loads(output) if output else None


def compiled_operations(compiled: list[TraceEvent]) -> list[Operation]:
    """Self times of the operations compiled by XLA and run on the CPU, which xprof omits from its table."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    # The runs around the current one, outermost first. A run's time isn't self time of the one around it.
    stack: list[TraceEvent] = []
    for run in sorted(compiled, key=lambda run: (run.line, run.begin, -run.end)):
        while stack and (stack[-1].line != run.line or stack[-1].end <= run.begin):
            stack.pop()
        length = (run.end - run.begin) / NANOSECONDS
        if stack:
            times[stack[-1].name] -= length
        times[run.name] += length
        counts[run.name] += 1
        stack.append(run)
    kinds = {name: "fusion" if (kind := name.split(".")[0]).endswith("fusion") else kind for name in times}
    return [Operation(name, kinds[name], counts[name], time, False) for name, time in times.items()]


def in_steps(operations: Sequence[Operation]) -> list[Operation]:
    """The operations outside of the input pipeline; only GPU or TPU operations if there are any."""
    of_steps = [operation for operation in operations if operation.kind != "Dataset"]
    return [operation for operation in of_steps if operation.on_device] or of_steps


def longest_operations(operations: list[Operation], layers: Collection[str]) -> tuple[OperationTime, ...]:
    """The operations that take longest in steps, at most `MOST`, in descending order."""
    chosen = in_steps(operations)
    total = sum(operation.milliseconds for operation in chosen) or 1.0
    names = LayerNames(layers, [operation.name for operation in chosen])
    chosen.sort(key=lambda operation: -operation.milliseconds)
    return tuple(
        OperationTime(name, kind, names.of(name), times, milliseconds, milliseconds / total)
        for name, kind, times, milliseconds, _ in chosen[:MOST]
    )


def input_stages(operations: Sequence[Operation]) -> frozenset[str]:
    """The stages of the input pipeline as the trace names them, such as `Prefetch`, `ParallelMapV2` and `Generator`."""
    paths = [operation.name.split("::")[2:] for operation in operations if operation.kind == "Dataset"]
    return frozenset(stage.partition("[")[0] for path in paths for stage in path)


def slowest_input_stage(operations: Sequence[Operation]) -> str:
    """The stage of the input pipeline with the most self time, or `""` without a pipeline."""
    stages = [one for one in operations if one.kind == "Dataset" and not one.name.endswith(_WAITING_STAGES)]
    return max(stages, key=lambda stage: stage.milliseconds).name.rpartition("::")[2] if stages else ""


class LayerNames:
    """Finds layers in the scopes of operations' names.

    TensorFlow appends a number to a repeated scope, and Keras numbers layers in the same way. Which of the two a number
    means is inferred from the unambiguous scopes.
    """

    def __init__(self, layers: Collection[str], operations: Iterable[str]):
        self.layers = frozenset(layers)
        scopes = {scope for name in operations for scope in name.split("/")[:-1]}
        # Whether TensorFlow has appended numbers: some scope is a layer's only without its number.
        self._is_numbered = any(self._without_number(scope) in self.layers for scope in scopes - self.layers)

    def of(self, operation: str) -> str:
        """The innermost layer that an operation belongs to, or `""`."""
        for scope in reversed(operation.split("/")[:-1]):
            for name in (self._without_number(scope), scope) if self._is_numbered else (scope,):
                if name in self.layers:
                    return name
        return ""

    @staticmethod
    def _without_number(scope: str) -> str:
        match = _NUMBERED_SCOPE.match(scope)
        return match[1] if match else ""


def layer_times(operations: Sequence[Operation], layers: Collection[str], optimizer: str = "") -> tuple[LayerTime, ...]:
    """Adds up the times of steps by layer and pass, longest first; empty if no operation is a layer's.

    Operations outside of layers have entries of their own.
    """
    chosen = in_steps(operations)
    optimizers = frozenset(re.findall(r"\w+", optimizer.lower()))
    names = LayerNames(layers, [operation.name for operation in chosen])
    times: dict[tuple[str, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operation in chosen:
        layer, scopes = names.of(operation.name), operation.name.split("/")[:-1]
        # A name, and whether it is a layer's.
        key = (layer, True) if layer else (_part_without_layer(operation, scopes, optimizers), False)
        times[key][_pass_of(scopes) if layer or key[0] == LOSS else "other"] += operation.milliseconds
    kinds: Mapping[str, str] = layers if isinstance(layers, Mapping) else {}
    by_layer = []
    for (name, is_layer), passes in times.items():
        by_layer.append(LayerTime(name, is_layer=is_layer, kind=kinds.get(name, "") if is_layer else "", **passes))
    by_layer.sort(key=lambda layer: -layer.total)
    return tuple(by_layer) if any(layer.is_layer for layer in by_layer) else ()


def kind_times(operations: Sequence[Operation]) -> tuple[KindTime, ...]:
    """The time of each kind of operation, in descending order."""
    times: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for operation in in_steps(operations):
        of_kind = times[VARIANT.sub("", operation.kind)]
        of_kind[0] += operation.milliseconds
        of_kind[1] += operation.times
    total = sum(time for time, _ in times.values()) or 1.0
    kinds = [KindTime(kind, int(count), time, time / total) for kind, (time, count) in times.items()]
    return tuple(sorted(kinds, key=lambda kind: -kind.milliseconds))


def _pass_of(scopes: Sequence[str]) -> str:
    """The pass that an operation belongs to, by the scopes in its name."""
    if any(scope in _BACKWARD for scope in scopes):
        return "backward"
    return "recompute" if any(_RECOMPUTED.fullmatch(scope) for scope in scopes) else "forward"


def _part_without_layer(operation: Operation, scopes: Sequence[str], optimizers: Collection[str]) -> str:
    """What an operation outside of layers belongs to; `optimizers` are lower-case names of optimizer classes."""
    if COLLECTIVE.search(operation.kind):
        return COLLECTIVES
    if _LOSS in scopes:
        return LOSS
    names = (_NUMBER.sub("", scope).replace("_", "") for scope in scopes)
    is_update = any(_UPDATE.fullmatch(scope) for scope in scopes) or any(name in optimizers for name in names)
    return OPTIMIZER if is_update else _REST
