"""The operations of a trace: which took longest, in which layer, and the stages of the input pipeline."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_paragrad.profiling.analysis.events import Compiled
from keras_paragrad.profiling.summary import OperationTime

MOST = 50
MILLISECONDS = 1e-3
_PIPELINE = ("Dataset", "PyFunc", "EagerPyFunc", "PyFuncStateless")
_WAITS = ("Prefetch", "Root")
# A scope with a number after it.
_COUNTED = re.compile(r"(.+)_\d+$")


class Operation(NamedTuple):
    """An operation's self time in milliseconds, and whether it ran on a GPU or TPU."""

    name: str
    kind: str
    times: int
    milliseconds: float
    on_device: bool


def xprof_operations(file: Path) -> list[Operation]:
    """The operations in a trace as xprof's `framework_op_stats` has them, without its row for idle time.

    Args:
        file: An `.xplane.pb`.
    """
    from xprof.convert.raw_to_tool_data import xspace_to_tool_data

    # xprof caches its results beside the trace, and those of one file would be used for all.
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, file.name)
        alone.symlink_to(file.resolve())
        answer = xspace_to_tool_data([str(alone)], "framework_op_stats", {})[0]
    tables = json.loads(answer) if answer else []
    rows = [row for table in tables[:1] for row in _rows(table)]
    return [
        Operation(
            str(row["operation"]),
            str(row["type"]),
            int(row["occurrences"]),
            float(row["total_self_time"]) * MILLISECONDS,
            row["host_or_device"] == "Device",
        )
        for row in rows
        if row["type"] != "IDLE"
    ]


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # By name: columns come and go from version to version.
    names = [column["id"] for column in table["cols"]]
    for row in table["rows"]:
        yield dict(zip(names, (cell["v"] for cell in row["c"]), strict=False))


def compiled_operations(compiled: list[Compiled]) -> list[Operation]:
    """The operations compiled by XLA and run on the CPU, which xprof omits from its table.

    Args:
        compiled: All executions. The time of nested executions is subtracted from the outer one's.
    """
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    around: list[Compiled] = []
    for each in sorted(compiled, key=lambda each: (each.line, each.begin, -each.end)):
        while around and (around[-1].line != each.line or around[-1].end <= each.begin):
            around.pop()
        length = (each.end - each.begin) / 1e6
        if around:
            times[around[-1].name] -= length
        times[each.name] += length
        counts[each.name] += 1
        around.append(each)
    return [Operation(name, _kind_of_compiled(name), counts[name], time, False) for name, time in times.items()]


def _kind_of_compiled(name: str) -> str:
    stem = name.split(".")[0]
    return "fusion" if stem.endswith("fusion") else stem


def longest_operations(operations: list[Operation], layers: Collection[str]) -> tuple[OperationTime, ...]:
    """The operations that took longest: those on a GPU or TPU where there are any, and never the input pipeline's.

    Args:
        operations: All in the trace.
        layers: The names of the model's layers.
    """
    own = [each for each in operations if each.kind not in _PIPELINE]
    chosen = [each for each in own if each.on_device] or own
    total = sum(each.milliseconds for each in chosen) or 1.0
    names = LayerNames(layers, [each.name for each in chosen])
    chosen.sort(key=lambda each: -each.milliseconds)
    return tuple(
        OperationTime(
            each.name, each.kind, names.of(each.name), each.times, each.milliseconds, each.milliseconds / total
        )
        for each in chosen[:MOST]
    )


def stages_of_the_pipeline(operations: Sequence[Operation]) -> frozenset[str]:
    """The stages of the input pipeline as the trace names them, such as `Prefetch`, `ParallelMapV2` and `Generator`.

    Args:
        operations: All in the trace.
    """
    paths = [each.name.split("::")[2:] for each in operations if each.kind == "Dataset"]
    return frozenset(stage.partition("[")[0] for path in paths for stage in path)


def slowest_of_the_pipeline(operations: Sequence[Operation]) -> str:
    """The stage of the input pipeline with the most self time, as the trace names it, or `""`.

    Args:
        operations: All in the trace.
    """
    parts = [each for each in operations if each.kind == "Dataset" and not each.name.endswith(_WAITS)]
    return max(parts, key=lambda each: each.milliseconds).name.rpartition("::")[2] if parts else ""


class LayerNames:
    """Finds layers in the scopes of operations' names.

    TensorFlow appends a number to a repeated scope, and Keras numbers layers in the same way. Which of the two a number
    means is inferred from the unambiguous scopes.

    Args:
        layers: The names of the model's layers, at every depth.
        operations: The names of all operations in the trace.

    Example:

    >>> from keras_paragrad.profiling.analysis.operations import LayerNames
    >>> names = ["model_1/dense_1/MatMul", "model_1/dense_1_1/MatMul", "gradient_tape/model_1/dense_1_1/Sum"]
    >>> layers = LayerNames(["dense", "dense_1"], names)
    >>> [layers.of(name) for name in [*names, "adam/truediv_5"]]
    ['dense', 'dense_1', 'dense_1', '']
    """

    def __init__(self, layers: Collection[str], operations: Iterable[str]):
        self.layers = frozenset(layers)
        scopes = {scope for name in operations for scope in name.split("/")[:-1]}
        self._is_counted = any(self._without_count(scope) in self.layers for scope in scopes - self.layers)

    def of(self, operation: str) -> str:
        """The innermost layer that an operation belongs to, or `""`."""
        for scope in reversed(operation.split("/")[:-1]):
            uncounted = self._without_count(scope)
            for name in (uncounted, scope) if self._is_counted else (scope,):
                if name in self.layers:
                    return name
        return ""

    @staticmethod
    def _without_count(scope: str) -> str:
        found = _COUNTED.match(scope)
        return found[1] if found else ""
