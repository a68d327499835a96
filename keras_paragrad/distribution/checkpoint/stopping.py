"""SIGTERM: noted when it comes, acted upon where all workers agree."""

import logging
import os
import signal
import threading
from types import FrameType

from keras_paragrad.distribution.checkpoint.files import Position

_log = logging.getLogger("keras_paragrad")


class TrainingInterrupted(SystemExit):  # noqa: N818
    """Training was asked to stop by SIGTERM, was backed up, and left `fit`.

    Nobody has to catch it: the process ends with status 143, as one does that SIGTERM has ended. The same command,
    started again, goes on where this one stopped.

    Args:
        position: Where training stands.
        saved: Whether there is a backup of that position.

    Attributes:
        code: 143, the exit status.
    """

    def __init__(self, position: Position, saved: bool):
        super().__init__(143)
        self.position = position
        self.saved = saved


class StopRequest:
    """Whether SIGTERM has been received since `listen`.

    The handler that was there before is called too. A second SIGTERM does what one would have done without us.
    """

    def __init__(self):
        self.received = False
        self._listening = False
        self._previous: signal.Handlers | object | None = None

    def listen(self) -> None:
        """Puts the handler in place, which only the main thread can do."""
        self.received = False
        if self._listening:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "fit runs in a thread other than the main one, where Python takes no signals: on SIGTERM this worker "
                "ends without a backup. Call fit in the main thread, or pass on_sigterm=False."
            )
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._listening = True

    def leave(self) -> None:
        """Puts the previous handler back, unless somebody has put another one there since."""
        if self._listening and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)  # pyright: ignore
        self._listening = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self.leave()
            os.kill(os.getpid(), number)
            return
        self.received = True
        if callable(self._previous):
            self._previous(number, frame)
