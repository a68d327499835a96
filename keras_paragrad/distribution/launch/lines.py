"""Filters the output of processes that run the same program: shows epochs and each traceback once."""

import enum
import re
import threading
import time
from collections.abc import Callable, Iterable

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(?:-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|-?inf)"
# `Epoch 1/3`; `3/3 ━━━ 0s 5ms/step - loss: 0.5`; `3/3 - 0s - 5ms/step - loss: 0.5`.
_EPOCH = re.compile(
    r"Epoch \d+/\d+|"
    rf" *\d+/(?:\d+|Unknown)[ ━]*(?:- )?[\d:]+s?(?: -)? \d+(?:ms|us|s)/\w+(?: - [\w./ -]+: {_NUMBER})* *"
)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):|  \+ Exception Group Traceback")
# C++ writes log lines between Python's lines.
_LOG_LINE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d+\.|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] |\*\*\* |WARNING: All log"
)
# Differences between processes with the same failure: memory and task addresses, and numbers of graph functions.
_OF_PROCESS = re.compile(r"0x[0-9a-f]+|(?<=:)\d{4,5}\b|(?<=task:)\d+|(?<=[Ww]orker )\d+|(?<=_)\d+(?=\])")
# The names of exceptions of workers that lost another worker, or were told to end.
_CONSEQUENCE = re.compile(
    r"WorkerLostError|TrainingInterrupted|KeyboardInterrupt|(?:Unavailable|Aborted|Cancelled|DeadlineExceeded)Error"
)
_MOST_LINES, _PAUSE_MILLISECONDS, _LONGEST_SECONDS = 2000, 500, 2.0


class Kind(enum.Enum):
    """The kind of some lines of a process. All but `OTHER` are tracebacks."""

    OTHER = enum.auto()
    ERROR = enum.auto()
    # Another process has printed the same.
    REPEATED = enum.auto()
    # The failure follows from the end of another process, or of all.
    CONSEQUENCE = enum.auto()


# Lines to show, in order, with their kind.
Shown = list[tuple[Kind, list[str]]]


class EpochLines:
    """Leaves out Keras's lines about epochs, and the empty ones after them.

    Example:

    >>> EpochLines().filter(["Epoch 1/3", "", "4/4 ━━━━ 0s 5ms/step - loss: 0.5", "4/4 files are read"])
    ['4/4 files are read']
    """

    def __init__(self):
        self._left_out = False

    def filter(self, lines: Iterable[str]) -> list[str]:
        """The other lines."""
        kept = []
        for line in lines:
            plain = _ANSI.sub("", line)
            self._left_out = bool(_EPOCH.fullmatch(plain)) or (self._left_out and not plain.strip())
            if not self._left_out:
                kept.append(line)
        return kept


class Errors:
    """The distinct errors of all processes, by their tracebacks, and who had each."""

    def __init__(self):
        self._seen_lock = threading.Lock()
        self._seen: dict[str, tuple[str, list[str]]] = {}

    def note(self, label: str, traceback: list[str]) -> bool:
        """Counts a process's traceback; returns whether no other process has had it."""
        key = _OF_PROCESS.sub("#", "\n".join(traceback).strip())
        with self._seen_lock:
            _, labels = self._seen.setdefault(key, (_exception_of(traceback), []))
            if label not in labels:
                labels.append(label)
            return labels == [label]

    def in_words(self) -> list[str]:
        """A sentence for each error that several processes had."""
        shared = [(exception, labels) for exception, labels in self._seen.values() if len(labels) > 1]
        return [
            f"{_listed(others)} failed with the same traceback as {first}: {exception}"
            for exception, (first, *others) in shared
        ]


class Tracebacks:
    """Holds each traceback of a process until it is whole, for `Errors` to know it.

    Args:
        label: The process.
        errors: The errors of all processes.
        clock: Returns the time in seconds.
    """

    def __init__(self, label: str, errors: Errors, clock: Callable[[], float] = time.monotonic):
        self._label = label
        self._errors = errors
        self._clock = clock
        self._held: list[str] = []
        self._begun = 0.0

    @property
    def pause(self) -> int | None:
        """Milliseconds without a line after which the held lines are complete; `None` if none are held."""
        return _PAUSE_MILLISECONDS if self._held else None

    def feed(self, lines: Iterable[str]) -> Shown:
        """Adds lines; returns the lines that are not, or no longer, held."""
        shown: Shown = []
        for line in lines:
            if self._held and not _LOG_LINE.match(line):
                self._held.append(line)
            elif not self._held and _TRACEBACK.match(line):
                self._held, self._begun = [line], self._clock()
            else:
                shown.append((Kind.OTHER, [line]))
        if len(self._held) > _MOST_LINES or (self._held and self._clock() - self._begun > _LONGEST_SECONDS):
            shown += self.release()
        return shown

    def release(self) -> Shown:
        """Returns the held lines as a traceback and its kind, and holds none from then on."""
        held, self._held = self._held, []
        if not held:
            return []
        if not self._errors.note(self._label, held):
            return [(Kind.REPEATED, held)]
        name = _exception_of(held).partition(":")[0].rpartition(".")[2]
        return [(Kind.CONSEQUENCE if _CONSEQUENCE.fullmatch(name) else Kind.ERROR, held)]


def _exception_of(traceback: list[str]) -> str:
    """The first line of the exception that a traceback ends with."""
    begins = max(index for index, line in enumerate(traceback) if index == 0 or _TRACEBACK.match(line))
    after = (line for line in traceback[begins + 1 :] if line[:1].strip())
    return next(after, traceback[-1].strip())[:300]


def _listed(labels: list[str]) -> str:
    *others, last = labels
    return f"{', '.join(others)} and {last}" if others else last
