"""`Profiler`: traces windows of a training run and summarizes them."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import keras

from keras_paragrad.arguments import (
    check_choice,
    check_flag,
    check_instance,
    check_integer,
    check_path,
)
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.types import Logs
from keras_paragrad.profiling.log_files import run_info, write_run_info
from keras_paragrad.profiling.schedule import DEFAULT, ProfileSchedule
from keras_paragrad.profiling.session import ProfilerPauses, Session, warn_of_missing
from keras_paragrad.profiling.summary import ProfileSummary
from keras_paragrad.profiling.terminal import WindowFigures, print_figures
from keras_paragrad.profiling.trace_windows import UpdateCount, WindowTracer

_log = logging.getLogger("keras_paragrad")

# On the other workers a collective's trace event starts in one thread and ends in another, once the first worker has
# answered. TensorFlow 2.21's profiler pairs such events through freed memory (`TraceMeRecorder::Consume`) and may
# crash.
FIRST_WORKER_ALONE = "Profiler traces the first worker only: on the others, TensorFlow's profiler may crash."

_NOT_TRACED = "A window was not traced"


class Profiler(keras.callbacks.Callback):
    """Traces windows of `fit` for TensorBoard's Profile tab, prints a summary of each, and writes an offline report.

    Works with `jit_compile`, `steps_per_execution`, gradient accumulation, strategies, several workers (the first
    is traced) and data of unknown length. A profiling failure is logged in one
    line, and training continues. Between windows, the overhead per batch is one comparison and one addition.

    Request a window of a running training with `trace_now()`, from a callback or another thread.

    Args:
        log_dir: Where traces go: TensorBoard's log directory.
        schedule: Which batches to trace, or `None` to trace on demand only.
        summary: Whether to print a summary when a window closes: step time and its breakdown, the longest operations,
            memory, one recommendation, and the command that opens TensorBoard.
        report: `"html"` to write a self-contained report at the end of `fit`, or `None`.
        keep: How many windows to keep on disk; the oldest are removed.

    Raises:
        ValueError: An argument is invalid. The message says what to write.

    Example:

    >>> import tempfile
    >>> import keras, numpy as np
    >>> from keras_paragrad import Profiler, ProfileSchedule
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> profiler = Profiler(tempfile.mkdtemp(), ProfileSchedule(skip_first=4, active=5), summary=False, report=None)
    >>> history = model.fit(np.ones((160, 8)), np.ones((160, 1)), batch_size=8, verbose=0, callbacks=[profiler])
    >>> [step.step for step in profiler.summaries[0].steps]
    [6, 7, 8, 9, 10]

    Attributes:
        summaries: The `keras_paragrad.profiling.summary.ProfileSummary` of each window of the last `fit`.
    """

    changes_training = False

    def __init__(
        self,
        log_dir: str | Path,
        schedule: ProfileSchedule | None = DEFAULT,
        *,
        summary: bool = True,
        report: str | bool | None = "html",
        keep: int = 5,
    ):
        check_internals("models")
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir, directory=True, example="logs")
        example = "ProfileSchedule(skip_first=10, active=20)"
        self.schedule = check_instance(
            "schedule", schedule, ProfileSchedule, "a ProfileSchedule", example=example, optional=True
        )
        self.summary = check_flag("summary", summary)
        self.report = check_choice("report", report, ("html", None, False)) or None
        self.keep = check_integer("keep", keep, example=5)
        self.summaries: list[ProfileSummary] = []
        warn_of_missing()
        self._tracer: WindowTracer | None = None
        # As the epoch began: how many batches had run, and how many the optimizer had seen.
        self._epoch: tuple[int, int | None] | None = None
        self._warned: set[str] = set()
        # The batch count from which `_advance` is due.
        self._next: float = math.inf
        # The batches that a call of the train function runs; Keras notifies callbacks once per call.
        self._per_call = 1
        self._batches = 0
        self._is_first_worker = True

    def trace_now(self) -> None:
        """Requests a window that begins with the next batch; may be called from any thread while `fit` runs."""
        if not self._is_first_worker:
            _log.warning("%s", FIRST_WORKER_ALONE)
        elif self._tracer is not None:
            self._tracer.requested = True
            self._next = 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Starts, continues or ends a window if one is due."""
        if self._batches >= self._next:
            self._safely(self._advance)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts batches."""
        self._batches += self._per_call

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts counting batches."""
        self.summaries = []
        self._warned = set()
        self._batches = 0
        self._per_call = self.model.steps_per_execution
        self._next = math.inf
        self._safely(self._begin)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Records where the epoch begins."""
        self._safely(self._resume)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Closes the last step marker, even of a call that got no data."""
        self._safely(self._pause)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Closes an open window, as validation is no part of one."""
        self._safely(self._pause)
        if self._tracer is not None and self._tracer.is_recording:
            self._safely(self._close)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Closes an open window, logs if none was traced, and writes the report."""
        self._safely(self._end)
        self._tracer, self._epoch, self._next = None, None, math.inf

    def _begin(self) -> None:
        """Prepares windows, on the first worker."""
        Session.end_running()
        run = run_info(self.model)
        self._is_first_worker = run.worker == 0
        self._tracer = None
        if self._is_first_worker:
            self._tracer = WindowTracer(self.model, self.log_dir, self.schedule, run, self.keep)
            self._update_next()
            self._safely(lambda: write_run_info(self.log_dir, run), "The run's description was not written")

    def _advance(self) -> None:
        """Before a call: opens, continues or closes a window."""
        closed = self._tracer and self._tracer.advance(self._batches)
        self._update_next()
        self._add(closed)

    def _update_next(self) -> None:
        """Looks up the batch at which something is due next."""
        self._next = math.inf if self._tracer is None else self._tracer.next_due(self._batches)
        # Another thread may have requested a window meanwhile.
        if self._tracer is not None and self._tracer.requested:
            self._next = 0

    def _pause(self) -> None:
        """Ends the last call: corrects the number of batches it ran, and closes its marker."""
        if self._epoch is not None:
            # The last call of an epoch may have got fewer batches than it asked for.
            (begin, before), seen, ran = self._epoch, self._seen_batches(), self.params.get("steps")
            ran = ran if seen is None or before is None else seen - before
            self._batches = self._batches if ran is None else min(self._batches, begin + ran)
        if self._tracer is not None:
            self._tracer.pause(self._batches)

    def _resume(self) -> None:
        self._epoch = self._batches, self._seen_batches()

    def _seen_batches(self) -> int | None:
        """How many batches the optimizer has seen, if that is needed to count those of an epoch."""
        is_needed = self._per_call > 1 and not self.params.get("steps")
        return UpdateCount(self.model.optimizer).batches if is_needed else None

    def _end(self) -> None:
        """Closes the open window, and writes the report, or warns that there was no window."""
        if self._tracer is None:
            return
        self._close()
        if not self._tracer.traced:
            self._warn_of_no_window()
        elif self.report:
            self._safely(lambda: _write_report(self.log_dir), "The report was not written")

    def _close(self) -> None:
        """Closes the open window."""
        if self._tracer is not None and self._tracer.window is not None:
            self._add(self._tracer.close(self._batches))
            self._update_next()

    def _add(self, closed: ProfileSummary | None) -> None:
        """Keeps and prints the summary of a window, if one has been closed."""
        if closed is None:
            return
        self.summaries.append(closed)
        if self.summary:
            figures = WindowFigures(closed, self.log_dir)
            with ProfilerPauses.timed():
                self._safely(lambda: print_figures(figures), "A window's summary was not printed")

    def _warn_of_no_window(self) -> None:
        """Warns that training was too short for a scheduled window, unless a failure has been logged."""
        first = self.schedule.window(0) if self.schedule else None
        if first is None or self._warned:
            return
        self._warned.add("no window")
        active = max(min(self._batches // 2, first.end - first.begin), 1)
        _log.warning(
            "Profiler traced nothing: its first window begins after %d batches, and training had %d. "
            "Write Profiler(..., schedule=ProfileSchedule(skip_first=%d, warmup=0, active=%d)).",
            *(first.begin, self._batches, self._batches // 4, active),
        )

    def _safely(self, action: Callable[[], None], failure: str = _NOT_TRACED) -> None:
        """Runs `action`, whose errors must not end training. After a failure to trace, the open window is abandoned."""
        try:
            action()
        except Exception as error:
            self._warn_once(failure, error)
            if failure == _NOT_TRACED:
                self._abandon()

    def _warn_once(self, failure: str, error: Exception) -> None:
        """Logs a failure, with its error's first line as the reason; once per reason in a `fit`."""
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        # A full disk or a read-only folder: the operating system's message doesn't name the folder.
        fix = f" Make space in {self.log_dir}, or give Profiler another log_dir." if isinstance(error, OSError) else ""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("%s: %s.%s Training continues.", failure, reason, fix)

    def _abandon(self) -> None:
        """Stops tracing the open window, if there is one, and discards it; later windows are still traced."""
        if self._tracer is None:
            return
        try:
            self._tracer.abandon()
        except Exception as error:
            self._warn_once(_NOT_TRACED, error)
        self._update_next()


def _write_report(log_dir: Path) -> None:
    from keras_paragrad.profiling.report import write_report

    _log.info("The report is in %s", write_report(log_dir))
