"""SIGTERM: recorded when received, acted upon where all workers agree."""

import logging
import os
import signal
import threading
from types import FrameType

from keras_paragrad.distribution.checkpoint.files import Position

_log = logging.getLogger("keras_paragrad")


class TrainingInterrupted(SystemExit):  # noqa: N818
    """Training was stopped by SIGTERM, was backed up, and left `fit`.

    It need not be caught: the process then exits with status 143, like one terminated by SIGTERM. Running the same
    command again resumes training.

    Args:
        position: The position of training.
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

    The previous handler is called too. A second SIGTERM has its usual effect.
    """

    def __init__(self):
        self.received = False
        self._listening = False
        self._previous: signal.Handlers | object | None = None

    def listen(self) -> None:
        """Installs the handler, which only the main thread can do."""
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
        """Restores the previous handler, unless another one has been installed since."""
        if self._listening:
            self._restore()
        self._listening = False

    def _restore(self) -> bool:
        installed = signal.getsignal(signal.SIGTERM) == self._handle
        if installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)  # pyright: ignore
        return installed

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listening and not self.received:
            self.received = True
        else:
            # A handler that was installed later, and left later, may have put this one back after its time.
            self._listening = False
            if self._restore():
                os.kill(os.getpid(), number)
                return
        if callable(self._previous):
            self._previous(number, frame)
