"""Graphs that are traced again, and for what."""

from typing import Any

from keras_paragrad._keras.telemetry_counts import Trace, compiled_functions, newest_trace


class Retraces:
    """Counts how often a train function's graphs are traced; the first time of each is none too many.

    Attributes:
        count: How many times a graph was traced again.
    """

    def __init__(self):
        self.count = 0
        self._function: Any = None
        self._traced: list[tuple[Any, int]] = []

    def watch(self, function: Any) -> None:
        """Looks at this train function from now on."""
        if function is not self._function:
            self._function = function
            before = {id(each): count for each, count in self._traced}
            self._traced = [(each, before.get(id(each), _count(each))) for each in compiled_functions(function)]

    def look(self) -> tuple[bool, list[Trace]]:
        """Whether graphs were traced since the last time, and one that was traced again, of those within each other."""
        counts = [_count(function) for function, _ in self._traced]
        if all(count == before for count, (_, before) in zip(counts, self._traced, strict=True)):
            return False, []
        again = []
        for place, (function, before) in enumerate(self._traced):
            if before and counts[place] > before:
                again.append(newest_trace(function))
            self._traced[place] = function, counts[place]
        self.count += bool(again)
        return True, again[:1]


def _count(function: Any) -> int:
    return function.experimental_get_tracing_count()
