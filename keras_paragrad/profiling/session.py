"""One run of TensorFlow's profiler, and where its trace goes."""

import contextlib
import json
import shutil
import socket
import tempfile
from datetime import datetime
from pathlib import Path
from typing import ClassVar

import tensorflow as tf

PROFILES = Path("plugins", "profile")
SUMMARY = "keras_paragrad.json"
TRACE = ".xplane.pb"


class Session:
    """Runs TensorFlow's profiler, of which a process has one.

    Args:
        log_dir: The log directory.

    Raises:
        RuntimeError: Another profiler is running; the message says which it may be.
        OSError: The log directory can't be written to.
    """

    running: "ClassVar[Session | None]" = None

    def __init__(self, log_dir: Path):
        self._log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        # Two trainings on one machine could write the same file, so that it is written elsewhere and moved.
        self._elsewhere = Path(tempfile.mkdtemp(prefix=".tracing-", dir=log_dir))
        try:
            # Without options, which TensorFlow 2.21 doesn't take, but warns of.
            tf.profiler.experimental.start(str(self._elsewhere))
        except tf.errors.AlreadyExistsError as error:
            self._clear()
            raise RuntimeError(
                "another profiler is running in this process. Leave `profile_batch` out of "
                "keras.callbacks.TensorBoard(), or write tf.profiler.experimental.stop() before fit()"
            ) from error
        Session.running = self

    @classmethod
    def end_running(cls) -> None:
        """Ends a session that a `fit` has left running when it broke off; Keras doesn't tell callbacks."""
        if cls.running is not None:
            cls.running.discard()

    def discard(self) -> None:
        """Ends the profiler and keeps nothing."""
        try:
            tf.profiler.experimental.stop(save=False)
        except tf.errors.UnavailableError:
            # Somebody else has ended it.
            pass
        finally:
            self._clear()

    def finish(self) -> Path:
        """Ends the profiler and puts its trace where TensorBoard finds it.

        Returns:
            The trace's folder.

        Raises:
            OSError: It can't be written.
            RuntimeError: There is nothing to write.
        """
        try:
            tf.profiler.experimental.stop(save=True)
            files = sorted(self._elsewhere.rglob(f"*{TRACE}"))
            if not files:
                raise RuntimeError("the profiler has written no trace")
            return self._move(files[0])
        except tf.errors.UnavailableError as error:
            raise RuntimeError("somebody else has ended the profiler") from error
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        finally:
            self._clear()

    def _move(self, file: Path) -> Path:
        # TensorBoard's own names go down to seconds, and several windows may end in one.
        name = datetime.now().strftime("%Y_%m_%d_%H_%M_%S_%f")
        folder = self._log_dir / PROFILES / name
        folder.mkdir(parents=True)
        host = socket.gethostname().partition(".")[0] or "host"
        file.rename(folder / f"{host}{TRACE}")
        return folder

    def _clear(self) -> None:
        if Session.running is self:
            Session.running = None
        shutil.rmtree(self._elsewhere, ignore_errors=True)


def remove_oldest(log_dir: Path, keep: int) -> None:
    """Removes the oldest windows, of this run and of others; traces that are not ours stay, and so do files in a window
    that neither this package nor TensorBoard has put there.

    Args:
        log_dir: The log directory.
        keep: How many to keep.
    """
    summaries = (log_dir / PROFILES).glob(f"*/{SUMMARY}")
    own = sorted(path.parent for path in summaries if _is_ours(path, log_dir))
    for folder in own[: max(len(own) - keep, 0)]:
        # What is left of a window that can't be removed is removed with the next.
        with contextlib.suppress(OSError):
            _remove(folder)


def _is_ours(summary: Path, log_dir: Path) -> bool:
    """Whether the summary says that the window in its folder is the one that it was written for."""
    try:
        found = json.loads(summary.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    folder = summary.parent
    written_for = isinstance(found, dict) and found.get("trace") == folder.relative_to(log_dir).as_posix()
    return written_for and not folder.is_symlink()


def _remove(folder: Path) -> None:
    hosts = {path.name.removesuffix(TRACE) for path in folder.glob(f"*{TRACE}")}
    # TensorBoard keeps what it makes of a trace beside it, under the name of the host or of all.
    prefixes = tuple(f"{host}." for host in (*hosts, "ALL_HOSTS"))
    for path in list(folder.iterdir()):
        if path.name == "cache_version.txt" or path.name.startswith(prefixes):
            path.unlink()
    # The last: without it, the rest would not be known as ours.
    (folder / SUMMARY).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()
