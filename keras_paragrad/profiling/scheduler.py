"""Follows a schedule during training, and requests by signal: which trace window comes next, and when."""

import logging
import math
import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from keras_paragrad.profiling.schedule import DEFAULT, ProfileSchedule, TraceWindow
from keras_paragrad.profiling.summary import ProfileSummary
from keras_paragrad.profiling.windows import WindowTracer

_log = logging.getLogger("keras_paragrad")


class WindowScheduler:
    """Opens and closes trace windows by schedule and on demand.

    Args:
        schedule: When windows are traced, or `None` for on demand only.
        tracer: Traces the windows.

    Attributes:
        requested: Whether a window has been requested.
    """

    def __init__(self, schedule: ProfileSchedule | None, tracer: WindowTracer):
        self.schedule = schedule
        self.tracer = tracer
        self.requested = False
        self._index = 0

    def next_due(self, batch: int) -> float:
        """The batch count at which `advance` has to be called next.

        Args:
            batch: How many batches have run.
        """
        if self.tracer.window is not None:
            return self.tracer.next_due()
        window = self._scheduled()
        while window is not None and window.end <= batch:
            # Another window or an evaluation overlapped it.
            self._index += 1
            window = self._scheduled()
        return math.inf if window is None else window.warmup

    def advance(self, batch: int) -> ProfileSummary | None:
        """Opens or closes a window before a call, if due.

        Args:
            batch: How many batches have run.

        Returns:
            The summary of the window that was closed, or `None`.
        """
        closed = None
        if self.tracer.window is not None and not self.tracer.advance(batch):
            closed = self.tracer.close(batch)
        if self.tracer.window is None:
            window = self._due(batch)
            if window is not None:
                self.tracer.open(window, batch)
                self.tracer.advance(batch)
        return closed

    def _due(self, batch: int) -> TraceWindow | None:
        """The window to open now: a requested one, or the schedule's."""
        if self.requested:
            self.requested = False
            return (self.schedule or DEFAULT).window_at(batch)
        window = self._scheduled()
        if window is None or not window.warmup <= batch < window.end:
            return None
        self._index += 1
        return window

    def _scheduled(self) -> TraceWindow | None:
        return self.schedule.window(self._index) if self.schedule else None


class RequestSignal:
    """Calls a function when this process receives a signal.

    Args:
        name: The signal's name, such as `"SIGUSR1"`, or `None` for no signal.
        request: Called on each signal, in the main thread, between any two lines.
    """

    # A `fit` that was aborted doesn't notify its callbacks.
    listening: "ClassVar[RequestSignal | None]" = None

    def __init__(self, name: str | None, request: Callable[[], None]):
        self._name = name
        self._request = request
        self._before: Any = None

    def listen(self) -> None:
        """Installs the handler, unless the signal already has one."""
        if RequestSignal.listening is not None:
            RequestSignal.listening.stop()
        RequestSignal.listening = self
        number = getattr(signal, self._name or "", None)
        if number is None or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(number)
        if before is not signal.SIG_DFL:
            _log.info("%s already has a handler, so it does not request a trace window.", self._name)
            return
        self._before = before
        signal.signal(number, lambda *_: self._request())

    def stop(self) -> None:
        """Restores the previous handler."""
        RequestSignal.listening = None
        if self._before is not None:
            signal.signal(getattr(signal, self._name or ""), self._before)
            self._before = None
