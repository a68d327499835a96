"""Requests a trace window of a running training, with a signal or by touching a file."""

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

_log = logging.getLogger("keras_paragrad")

FILE = "profile-now"
POLL_SECONDS = 1.0


class OnDemand:
    """Waits for a signal to this process, and for the file `profile-now` in the log directory to be touched.

    Args:
        log_dir: The log directory. The file is kept; touching it again requests another window.
        signal_name: The signal's name, such as `"SIGUSR1"`, or `None` for no signal.
        request: Called on each request, from another thread or a signal handler.
    """

    listening: "ClassVar[OnDemand | None]" = None

    def __init__(self, log_dir: Path, signal_name: str | None, request: Callable[[], None]):
        self._file = log_dir / FILE
        self._signal_name = signal_name
        self._request = request
        self._before: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts listening."""
        # Left over from an aborted `fit`, of which Keras doesn't notify callbacks.
        if OnDemand.listening is not None:
            OnDemand.listening.end()
        OnDemand.listening = self
        self._listen()
        self._ended.clear()
        # Polling the disk may take longer than a batch, so it runs in its own thread.
        self._thread = threading.Thread(target=self._poll, args=(self._touched(),), name="profile-now", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops listening, and restores the signal handler."""
        OnDemand.listening = None
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._before is not None:
            signal.signal(getattr(signal, self._signal_name or ""), self._before)
            self._before = None

    def _listen(self) -> None:
        number = getattr(signal, self._signal_name or "", None)
        if number is None or threading.current_thread() is not threading.main_thread() or self._before is not None:
            return
        before = signal.getsignal(number)
        if before is not signal.SIG_DFL:
            _log.info("%s already has a handler, so it does not request a trace window.", self._signal_name)
            return
        self._before = before
        signal.signal(number, lambda *_: self._request())

    def _poll(self, seen: float) -> None:
        while not self._ended.wait(POLL_SECONDS):
            touched = self._touched()
            if touched > seen:
                self._request()
            seen = touched

    def _touched(self) -> float:
        try:
            return self._file.stat().st_mtime
        except OSError:
            return 0.0
