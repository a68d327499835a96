"""Traces windows, which are ranges of batches: step markers, a window from its start to its summary, and the scheduler.

A call is a call of the train function, which runs `steps_per_execution` batches.
"""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.extras import MissingExtraError
from keras_paragrad.profiling.memory import PeakMemory
from keras_paragrad.profiling.schedule import DEFAULT, ProfileSchedule, TraceWindow
from keras_paragrad.profiling.session import SUMMARY, ProfilerPauses, Session, remove_oldest
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo
from keras_paragrad.profiling.updates import UpdateCount

_log = logging.getLogger("keras_paragrad")


class StepMarkers:
    """Marks each call from its start to the start of the next, so that the time of other callbacks is included.

    A step marker is a step for TensorBoard. If an update takes several batches, the update is the step, with its
    batches nested inside. The markers carry all metadata that the analysis needs.

    Args:
        updates: Counts batches into updates; positioned before the first call.
        per_call: How many batches a call runs.
        pulls: Batches taken from iterators per training batch: one for each replica.
    """

    def __init__(self, updates: UpdateCount, per_call: int, pulls: int):
        self._updates = updates
        self._per_call = per_call
        self._pulls = pulls
        self._nested = updates.batches_per_update > 1 and per_call == 1
        self._update: tf.profiler.experimental.Trace | None = None
        self._call: tf.profiler.experimental.Trace | None = None
        self._batch = 0

    def open(self, batch: int) -> None:
        """Marks the start of a call after `batch` batches, and the end of the previous one."""
        self.close(batch, pauses=False)
        updates = self._updates
        stats = {"batch": batch, "update": updates.update, "pulls": self._pulls}
        if self._nested:
            if self._update is None:
                # Without `_r=1`, TensorBoard shows no steps.
                self._update = tf.profiler.experimental.Trace("update", step_num=updates.update, _r=1)
            self._call = tf.profiler.experimental.Trace("batch", **stats)
        else:
            # From these, the analysis numbers the updates of a call's batches.
            stats |= {"count": self._per_call, "left": updates.left, "each": updates.batches_per_update}
            self._call = tf.profiler.experimental.Trace("train", step_num=batch, _r=1, **stats)
        self._batch = batch

    def close(self, batch: int, *, pauses: bool = True) -> None:
        """Marks the end of the last call, if open, and of its update, if complete or if training pauses.

        If `batch`, the number of batches that have run, is as before the call, the data had ended: no `ran` is set.
        """
        update = self._updates.update
        if self._call is not None:
            if batch > self._batch:
                self._call.set_metadata(ran=1)
                self._updates.advance(batch - self._batch)
            self._call.__exit__(None, None, None)
            self._call = None
        if self._update is not None and (pauses or self._updates.update != update):
            self._update.__exit__(None, None, None)
            self._update = None

    def read(self) -> None:
        """Rereads the optimizer's position: the end of an epoch may have completed an update."""
        self._updates.read()


class WindowTracer:
    """Traces windows of a model's training, and keeps the newest `keep` on disk.

    Attributes:
        window: The open window, from its warm-up to its end, or `None`.
        traced: How many windows have been written.
    """

    def __init__(self, model: keras.Model, log_dir: Path, run: RunInfo, keep: int):
        self.window: TraceWindow | None = None
        self.traced = 0
        # Why traces could not be read; each reason is logged once.
        self._logged_reasons: set[str] = set()
        self._model = model
        self._log_dir = log_dir
        self._run = run
        self._keep = keep
        self._session: Session | None = None
        self._markers: StepMarkers | None = None
        self._memory: PeakMemory | None = None
        self._layers = {layer.name: type(layer).__name__ for layer in all_layers(model)}
        self._pulls = replica_placement(model.distribute_strategy).local

    def next_due(self) -> int:
        """The batch count at which the open window needs its next `advance`; 0 if it needs one before every call."""
        if self.window is None or self._markers is not None:
            return 0
        return self.window.begin

    def advance(self, batch: int) -> bool:
        """Advances the open window before a call, after `batch` batches; returns whether it stays open."""
        if self.window is None:
            return False
        if self._markers is not None and batch >= self.window.end:
            return False
        if self._markers is None and batch >= self.window.begin:
            self._begin(batch)
        if self._markers is not None and self._memory is not None:
            self._markers.open(batch)
            self._memory.sample(batch)
        return True

    @ProfilerPauses.timed()
    def open(self, window: TraceWindow, batch: int) -> None:
        """Opens a window after `batch` batches, starting with the profiler's warm-up.

        Raises:
            RuntimeError: Another profiler is running.
            OSError: The log directory can't be written to.
        """
        # A call of several batches may have run past its start.
        delay = max(batch - window.begin, 0)
        self.window = TraceWindow(window.warmup, window.begin + delay, window.end + delay)
        if self.window.begin > batch:
            self._session = Session(self._log_dir)

    @ProfilerPauses.timed()
    def _begin(self, batch: int) -> None:
        """Starts recording. With one batch per call, a window has whole updates, and is postponed if one has begun."""
        window = self.window
        assert window is not None
        updates = UpdateCount(self._model.optimizer)
        per_call = self._model.steps_per_execution
        if per_call == 1 and updates.position:
            self.window = TraceWindow(
                window.warmup, batch + updates.left, batch + updates.left + window.end - window.begin
            )
            return
        if per_call == 1:
            length = window.end - window.begin
            batches = updates.batches_per_update
            self.window = TraceWindow(window.warmup, batch, batch + -(-length // batches) * batches)
        # What the warm-up traced isn't kept.
        if self._session is not None:
            self._session.discard()
        self._session = Session(self._log_dir)
        self._memory = PeakMemory()
        self._markers = StepMarkers(updates, per_call, self._pulls)

    def pause(self, batch: int) -> None:
        """Closes the last step marker, as training pauses."""
        if self._markers is not None:
            self._markers.close(batch)

    def resume(self) -> None:
        """Resumes after a pause: the end of an epoch may have applied an incomplete update."""
        if self._markers is not None:
            self._markers.read()

    @ProfilerPauses.timed()
    def close(self, batch: int) -> ProfileSummary | None:
        """Closes the window after `batch` batches, and writes and returns its summary; `None` if it had not begun.

        Raises:
            OSError: The trace can't be written.
        """
        self.pause(batch)
        session, memory = self._session, self._memory
        recording = self._markers is not None
        self._session = self._markers = self._memory = self.window = None
        if session is None or memory is None or not recording:
            if session is not None:
                session.discard()
            return None
        folder = session.finish()
        self.traced += 1
        summary = self._read(folder, memory.peaks())
        trace = folder.relative_to(self._log_dir).as_posix()
        summary = replace(summary, trace=trace, memory=summary.memory or memory.samples())
        try:
            (folder / SUMMARY).write_text(json.dumps(summary.to_dict()), "utf-8")
            remove_oldest(self._log_dir, self._keep)
        except OSError as error:
            _log.warning(
                "The trace is in %s, but its summary could not be written: %s. Training continues.", folder, error
            )
        return summary

    def _read(self, folder: Path, peaks: dict[str, int | None]) -> ProfileSummary:
        """Summarizes a trace, with peak memory by device; if it can't be read, the summary has a note that says why."""
        try:
            from keras_paragrad.profiling.analysis import summarize

            return summarize(folder, run=self._run, layers=self._layers, peak_memory=peaks)
        # The trace itself is on disk for TensorBoard.
        except MissingExtraError as error:
            reason, note = str(error), f"The trace is in {folder}, but was not read. {error}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            note = (
                f"The trace is in {folder}, but could not be read ({type(error).__name__}: {error}). "
                "Run pip install -U 'keras_paragrad[profile]'."
            )
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            _log.warning("%s", note)
        return ProfileSummary(run=self._run, peak_memory=peaks, notes=(note,))

    @ProfilerPauses.timed()
    def abandon(self) -> None:
        """Ends the open window and discards its trace."""
        session = self._session
        self._session = self._markers = self._memory = self.window = None
        if session is not None:
            session.discard()


class WindowScheduler:
    """Opens and closes trace windows, by schedule if there is one, and on demand.

    Attributes:
        requested: Whether a window has been requested.
    """

    def __init__(self, schedule: ProfileSchedule | None, tracer: WindowTracer):
        self.schedule = schedule
        self.tracer = tracer
        self.requested = False
        self._index = 0

    def next_due(self, batch: int) -> float:
        """The batch count at which `advance` has to be called next, once `batch` batches have run."""
        if self.tracer.window is not None:
            return self.tracer.next_due()
        window = self._scheduled()
        while window is not None and window.end <= batch:
            # Another window or an evaluation overlapped it.
            self._index += 1
            window = self._scheduled()
        return math.inf if window is None else window.warmup

    def advance(self, batch: int) -> ProfileSummary | None:
        """Opens or closes a window before a call, if due; returns the summary of a closed one."""
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
