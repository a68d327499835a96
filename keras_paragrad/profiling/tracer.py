"""`Profiler`: traces windows of a training run, which are ranges of batches, and prints their summaries."""

import logging
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.arguments import check_choice, check_flag, check_instance, check_path
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.types import Logs
from keras_paragrad.plain_text import Printable, show
from keras_paragrad.profiling.log_files import run_info, write_run_info
from keras_paragrad.profiling.schedule import DEFAULT, ProfileSchedule
from keras_paragrad.profiling.session import ProfilerPauses, Session, warn_of_missing
from keras_paragrad.profiling.summary import VARIANT, ProfileSummary, StepTime, shares_of
from keras_paragrad.profiling.trace_windows import UpdateCount, WindowTracer

_log = logging.getLogger("keras_paragrad")

# On the other workers a collective's trace event starts in one thread and ends in another, once the first worker has
# answered. TensorFlow 2.21's profiler pairs such events through freed memory (`TraceMeRecorder::Consume`) and may
# crash.
FIRST_WORKER_ALONE = "Profiler traces the first worker only: on the others, TensorFlow's profiler may crash."

_NOT_TRACED = "A window was not traced"
# The widest line of a printed summary, and what it calls the parts of a step.
WIDTH = 100
PARTS = {
    "input": "waiting for input",
    "host": "on the host, between operations",
    "compile": "compiling functions",
    "compute": "computing",
    "collective": "with other replicas",
    "idle": "idle (untraced Python)",
}
_BAR, _MOST_OPERATIONS = 24, 5


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
        """Starts counting batches, and prepares windows on the first worker."""
        self.summaries, self._warned, self._tracer = [], set(), None
        self._batches, self._per_call, self._next = 0, self.model.steps_per_execution, math.inf
        self._safely(self._begin)

    def _begin(self) -> None:
        Session.end_running()
        run = run_info(self.model)
        self._is_first_worker = run.worker == 0
        if self._is_first_worker:
            self._tracer = WindowTracer(self.model, self.log_dir, self.schedule, run)
            self._update_next()
            self._safely(lambda: write_run_info(self.log_dir, run), "The run's description was not written")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Records where the epoch begins."""
        self._safely(self._resume)

    def _resume(self) -> None:
        self._epoch = self._batches, self._seen_batches()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Closes the last step marker, even of a call that got no data."""
        self._safely(self._pause)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Closes an open window, as validation is no part of one."""
        self._safely(self._pause)
        if self._tracer is not None and self._tracer.is_recording:
            self._safely(self._close)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Closes an open window, and writes the report, or logs that there was no window."""
        self._safely(self._close)
        if self._tracer is not None and self._tracer.traced and self.report:
            self._safely(lambda: _write_report(self.log_dir), "The report was not written")
        elif self._tracer is not None and not self._tracer.traced:
            self._warn_of_no_window()
        self._tracer, self._epoch, self._next = None, None, math.inf

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

    def _seen_batches(self) -> int | None:
        """How many batches the optimizer has seen, if that is needed to count those of an epoch."""
        is_needed = self._per_call > 1 and not self.params.get("steps")
        return UpdateCount(self.model.optimizer).batches if is_needed else None

    def _close(self) -> None:
        """Closes the open window, if there is one."""
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
        active = max(min(self._batches // 2, first.end - first.begin), 1)
        _log.warning(
            "Profiler traced nothing: its first window begins after %d batches, and training had %d. "
            "Write Profiler(..., schedule=ProfileSchedule(skip_first=%d, warmup=0, active=%d)).",
            *(first.begin, self._batches, self._batches // 4, active),
        )

    def _safely(self, action: Callable[[], None], failure: str = _NOT_TRACED) -> None:
        """Runs `action`, whose errors must not end training: the first line of each is logged once in a `fit`.

        After a failure to trace, the open window is abandoned; later ones are still traced.
        """
        try:
            action()
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            # A full disk or a read-only folder: the operating system's message doesn't name the folder.
            space = f" Make space in {self.log_dir}, or give Profiler another log_dir."
            if reason not in self._warned:
                self._warned.add(reason)
                fix = space if isinstance(error, OSError) else ""
                _log.warning("%s: %s.%s Training continues.", failure, reason, fix)
            if failure == _NOT_TRACED and self._tracer is not None:
                self._safely(self._tracer.abandon, "A window was not ended")
                self._update_next()


def _write_report(log_dir: Path) -> None:
    from keras_paragrad.profiling.report import write_report

    _log.info("The report is in %s", write_report(log_dir))


class WindowFigures(Printable):
    """A window's summary with its longest operations, for `print` and for a rich console."""

    width = WIDTH

    def __init__(self, summary: ProfileSummary, log_dir: str | Path):
        self.summary = summary
        self.command = f"tensorboard --logdir {shlex.quote(str(log_dir))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self.summary
        headline = "Profile without steps"
        if steps := summary.steps:
            median, high = np.percentile([step.duration for step in steps], [50, 95])
            headline = f"Profile of batches {steps[0].step} to {steps[-1].step}: {median:.2f} ms per batch (median), "
            headline += f"{high:.2f} ms (p95)"
        yield Text(headline, "bold")
        if steps:
            yield _parts_table(steps)
        if summary.operations:
            yield _operations_table(summary)
        if summary.pipeline:
            times = summary.pipeline
            yield Text(
                f"Stages wait {times.bubble:.0%} of the time; {times.stages} of equal time would wait {times.ideal:.0%}"
            )
        peaks = {
            name: "n/a" if peak is None else f"{peak / 2**20:,.0f} MiB" for name, peak in summary.peak_memory.items()
        }
        yield Text(f"Peak memory: {', '.join(f'{name} {peak}' for name, peak in peaks.items()) or 'n/a'}")
        if summary.advice:
            yield Text(f"{summary.advice.evidence}: {summary.advice.text}", "bold")
        for note in summary.notes:
            yield Text(note, "dim")
        yield Text(f"To open in TensorBoard: {self.command}", overflow="fold")


def print_figures(figures: WindowFigures) -> None:
    """Prints figures in the terminal's width and colours, or as plain text to a file."""
    # Ends the line of Keras's progress bar.
    print()
    show(figures)


def _parts_table(steps: Sequence[StepTime]) -> Table:
    shares = shares_of(steps)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    for name, words in PARTS.items():
        # Most windows compile nothing.
        if name != "compile" or shares[name]:
            table.add_row(f"{shares[name]:.1%}", "█" * round(shares[name] * _BAR), words)
    return table


def _operations_table(summary: ProfileSummary) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in ("Operation", "Layer"):
        table.add_column(header, overflow="fold")
    for header in ("Count", "ms per step" if summary.steps else "ms", ""):
        table.add_column(header, justify="right")
    for operation in summary.operations[:_MOST_OPERATIONS]:
        table.add_row(
            VARIANT.sub("", operation.kind),
            operation.layer or "-",
            str(operation.count),
            f"{summary.per_step(operation):.2f}",
            f"{operation.share:.0%}",
        )
    return table
