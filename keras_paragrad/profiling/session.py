"""A session of TensorFlow's profiler: its requirements, its files, and how long it pauses training.

A session traces one window, a range of batches. On disk, a window is a folder with a trace and this package's summary.
"""

import contextlib
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import tensorflow as tf

from keras_paragrad.extras import explain_missing, is_installed

_log = logging.getLogger("keras_paragrad")

PROFILES = Path("plugins", "profile")
SUMMARY = "keras_paragrad.json"
TRACE = ".xplane.pb"
_PURPOSES = {"xprof": "read a trace", "tensorboard": "view one in TensorBoard"}


class Session:
    """Runs TensorFlow's profiler. A process can run one session at a time."""

    running: "ClassVar[Session | None]" = None

    def __init__(self, log_dir: Path):
        self._log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        # Two trainings on one machine could write the same file, so the trace is written to a separate folder first.
        self._folder = Path(tempfile.mkdtemp(prefix=".tracing-", dir=log_dir))
        try:
            # Without options: TensorFlow 2.21 ignores them with a warning.
            tf.profiler.experimental.start(str(self._folder))
        except tf.errors.AlreadyExistsError as error:
            self._clear()
            raise RuntimeError(
                "another profiler is running in this process. Remove `profile_batch` from "
                "keras.callbacks.TensorBoard(), or call tf.profiler.experimental.stop() before fit()"
            ) from error
        Session.running = self

    @classmethod
    def end_running(cls) -> None:
        """Ends a session left running by an aborted `fit`, because Keras doesn't notify callbacks of failures."""
        if cls.running is not None:
            cls.running.discard()

    def discard(self) -> None:
        """Stops the profiler and discards its trace."""
        try:
            tf.profiler.experimental.stop(save=False)
        except tf.errors.UnavailableError:
            # It was stopped from elsewhere.
            pass
        finally:
            self._clear()

    def finish(self) -> Path:
        """Stops the profiler, moves its trace to where TensorBoard finds it, and returns the trace's folder."""
        try:
            tf.profiler.experimental.stop(save=True)
            files = sorted(self._folder.rglob(f"*{TRACE}"))
            if not files:
                raise RuntimeError("the profiler wrote no trace")
            # Named after the time, as TensorBoard expects; its own names have a resolution of seconds, in which several
            # windows may end.
            folder = self._log_dir / PROFILES / datetime.now().strftime("%Y_%m_%d_%H_%M_%S_%f")
            folder.mkdir(parents=True)
            files[0].rename(folder / f"{socket.gethostname().partition('.')[0] or 'host'}{TRACE}")
            return folder
        except tf.errors.UnavailableError as error:
            raise RuntimeError("the profiler was stopped from elsewhere") from error
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        finally:
            self._clear()

    def _clear(self) -> None:
        if Session.running is self:
            Session.running = None
        shutil.rmtree(self._folder, ignore_errors=True)


class ProfilerPauses:
    """The time that training was paused to start and stop sessions, per process; `Throughput` excludes it."""

    seconds: ClassVar[float] = 0.0

    @classmethod
    @contextlib.contextmanager
    def timed(cls) -> Generator[None]:
        """Context manager or decorator that adds the time of its body; if nested, that would count twice."""
        start = time.perf_counter()
        try:
            yield
        finally:
            cls.seconds += time.perf_counter() - start


def warn_of_missing() -> None:
    """Logs which packages are missing."""
    missing = [f"{name} (to {purpose})" for name, purpose in _PURPOSES.items() if not is_installed(name)]
    if missing:
        _log.warning("%s", explain_missing("Profiler", missing))
