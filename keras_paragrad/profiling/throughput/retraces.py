"""Graphs that are traced again, and for what."""

from collections.abc import Sized
from typing import Any

from keras_paragrad._keras.telemetry.counts import TracedGraph, compiled_functions, graphs_of, newest_trace


class Retraces:
    """Counts how often a train function's graphs are traced; the first time of each is none too many.

    Attributes:
        count: How many times a graph was traced again.
    """

    def __init__(self):
        self.count = 0
        self._function: Any = None
        self._traced: list[Any] = []
        self._graphs: list[Sized] = []
        self._counts: list[int] = []

    def watch(self, function: Any) -> None:
        """Looks at this train function from now on."""
        if function is self._function:
            return
        before = {id(each): count for each, count in zip(self._traced, self._counts, strict=True)}
        self._function, self._traced = function, compiled_functions(function)
        self._graphs = [graphs_of(each) for each in self._traced]
        so_far = map(len, self._graphs)
        self._counts = [before.get(id(each), count) for each, count in zip(self._traced, so_far, strict=True)]

    def happened(self) -> bool:
        """Whether graphs were traced since the last look."""
        # In every step's time.
        return list(map(len, self._graphs)) != self._counts

    def look(self) -> list[TracedGraph]:
        """Of graphs within each other that were traced again since the last time, the outer one."""
        before, self._counts = self._counts, list(map(len, self._graphs))
        again = [
            newest_trace(function)
            for function, was, count in zip(self._traced, before, self._counts, strict=True)
            if 0 < was < count
        ]
        self.count += bool(again)
        return again[:1]
