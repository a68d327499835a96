"""Detects retraces, and the shapes that caused them."""

from collections.abc import Sized
from typing import Any

from keras_paragrad._keras.telemetry.counts import TracedGraph, compiled_functions, graphs_of, newest_trace


class Retraces:
    """Counts the retraces of a train function's graphs; the first trace of each doesn't count.

    Attributes:
        count: The number of retraces.
    """

    def __init__(self):
        self.count = 0
        self._function: Any = None
        self._traced: list[Any] = []
        self._graphs: list[Sized] = []
        self._counts: list[int] = []

    def watch(self, function: Any) -> None:
        """Observes this train function from now on."""
        if function is self._function:
            return
        before = {id(each): count for each, count in zip(self._traced, self._counts, strict=True)}
        self._function, self._traced = function, compiled_functions(function)
        self._graphs = [graphs_of(each) for each in self._traced]
        so_far = map(len, self._graphs)
        self._counts = [before.get(id(each), count) for each, count in zip(self._traced, so_far, strict=True)]

    def happened(self) -> bool:
        """Whether graphs were traced since the last `look`."""
        # This runs in every step.
        return list(map(len, self._graphs)) != self._counts

    def look(self) -> list[TracedGraph]:
        """The graphs retraced since the last call; of nested ones, only the outermost."""
        before, self._counts = self._counts, list(map(len, self._graphs))
        again = [
            newest_trace(function)
            for function, was, count in zip(self._traced, before, self._counts, strict=True)
            if 0 < was < count
        ]
        self.count += bool(again)
        return again[:1]
