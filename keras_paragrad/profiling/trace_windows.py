"""Windows, which are ranges of batches that are traced.

A call is a call of the train function, which runs `steps_per_execution` batches.
"""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.optimizer import find_accumulator, innermost_optimizer
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.extras import MissingExtraError
from keras_paragrad.profiling.memory import PeakMemory
from keras_paragrad.profiling.schedule import DEFAULT, ProfileSchedule, TraceWindow
from keras_paragrad.profiling.session import SUMMARY, ProfilerPauses, Session
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo

_log = logging.getLogger("keras_paragrad")


class UpdateCount:
    """Counts batches into updates: reads the optimizer's position once, then follows its schedule.

    Attributes:
        update: The update that the next batch belongs to, counted from 0.
        position: The number of batches of this update that have run.
        batches_per_update: How many batches the update takes.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer | None):
        known = isinstance(optimizer, keras.optimizers.Optimizer)
        self._optimizer: Any = (find_accumulator(optimizer) or innermost_optimizer(optimizer)) if known else None
        self.update = self.position = 0
        self.batches_per_update = 1
        self.read()

    def read(self) -> None:
        """Reads `update` and `position` from the optimizer, which waits for the device."""
        optimizer, seen = self._optimizer, self.batches
        if isinstance(optimizer, AccumulatingOptimizer):
            self.update = int(optimizer.iterations.numpy())
            self.position = int(optimizer.window.position.numpy()) if optimizer.built else 0
        elif seen is not None:
            self.update, self.position = divmod(seen, optimizer.gradient_accumulation_steps or 1)
        self.batches_per_update = self._batches_of(self.update)

    def _batches_of(self, update: int) -> int:
        if isinstance(self._optimizer, AccumulatingOptimizer):
            return self._optimizer.schedule.at(update)
        return getattr(self._optimizer, "gradient_accumulation_steps", None) or 1

    @property
    def left(self) -> int:
        """How many batches the update still needs."""
        return max(self.batches_per_update - self.position, 1)

    @property
    def batches(self) -> int | None:
        """How many batches the optimizer has seen, or `None` if it doesn't count them; waits for the device."""
        if self._optimizer is None or isinstance(self._optimizer, AccumulatingOptimizer):
            return None
        # An optimizer's first variable counts its calls, even if `iterations` is overridden.
        return int(self._optimizer.variables[0].numpy())

    def advance(self, batches: int) -> None:
        """Counts a number of batches that have run, without waiting for the device."""
        for _ in range(batches):
            self.position += 1
            if self.position >= self.batches_per_update:
                self.update, self.position = self.update + 1, 0
                self.batches_per_update = self._batches_of(self.update)


class StepMarkers:
    """Marks each call from its start to the start of the next, so that the time of other callbacks is included.

    Each is a step for TensorBoard, and carries all metadata that the analysis needs. Memory is sampled at each.
    """

    def __init__(self, updates: UpdateCount, per_call: int, pulls: int):
        self._updates, self._stats = updates, {"count": per_call, "pulls": pulls}
        self._call: tf.profiler.experimental.Trace | None = None
        self._batch = 0
        self.memory = PeakMemory()

    def open(self, batch: int) -> None:
        """Marks the start of a call after `batch` batches, and the end of the previous one."""
        updates = self._updates
        if self._call is None:
            # After a pause: the end of an epoch may have completed an update.
            updates.read()
        self.close(batch)
        # From these, the analysis numbers the updates of a call's batches.
        of_updates = {"update": updates.update, "left": updates.left, "each": updates.batches_per_update}
        # Without `_r=1`, TensorBoard shows no steps.
        self._call = tf.profiler.experimental.Trace(
            "train", step_num=batch, _r=1, batch=batch, **of_updates, **self._stats
        )
        self._batch = batch
        self.memory.sample(batch)

    def close(self, batch: int) -> None:
        """Marks the end of the last call, if open.

        If `batch`, the number of batches that have run, is as before the call, the data had ended: no `ran` is set.
        """
        if self._call is not None:
            if batch > self._batch:
                self._call.set_metadata(ran=1)
                self._updates.advance(batch - self._batch)
            self._call.__exit__(None, None, None)
            self._call = None


class WindowTracer:
    """Traces windows of a model's training, by schedule if there is one, and on demand.

    Attributes:
        window: The open window, from its warm-up to its end, or `None`.
        requested: Whether a window has been requested.
        traced: How many windows have been written.
    """

    def __init__(self, model: keras.Model, log_dir: Path, schedule: ProfileSchedule | None, run: RunInfo):
        self.window: TraceWindow | None = None
        self.requested = False
        self.traced = 0
        self._model, self._log_dir, self._run = model, log_dir, run
        self._schedule, self._index = schedule, 0
        # Why traces could not be read, each of which is logged once.
        self._logged_problems: set[str] = set()
        self._session: Session | None = None
        self._markers: StepMarkers | None = None
        self._layers = {layer.name: type(layer).__name__ for layer in all_layers(model)}

    @property
    def is_recording(self) -> bool:
        """Whether a window is open, and its warm-up is over."""
        return self._markers is not None

    def next_due(self, batch: int) -> float:
        """The batch count at which `advance` has to be called next, once `batch` batches have run."""
        if self.window is not None:
            return 0 if self._markers is not None else self.window.begin
        window = self._scheduled()
        while window is not None and window.end <= batch:
            # Another window or an evaluation overlapped it.
            self._index += 1
            window = self._scheduled()
        return math.inf if window is None else window.warmup

    def advance(self, batch: int) -> ProfileSummary | None:
        """Opens, continues or closes a window before a call, if due; returns the summary of a closed one."""
        closed = None
        if self._markers is not None and self.window is not None and batch >= self.window.end:
            closed = self.close(batch)
        if self.window is None and (window := self._due(batch)):
            self._open(window, batch)
        if self._markers is None and self.window is not None and batch >= self.window.begin:
            self._begin(batch)
        if self._markers is not None:
            self._markers.open(batch)
        return closed

    def _due(self, batch: int) -> TraceWindow | None:
        """The window to open now: a requested one, or the schedule's."""
        if self.requested:
            self.requested = False
            return (self._schedule or DEFAULT).window_at(batch)
        window = self._scheduled()
        if window is None or not window.warmup <= batch < window.end:
            return None
        self._index += 1
        return window

    def _scheduled(self) -> TraceWindow | None:
        return self._schedule.window(self._index) if self._schedule else None

    @ProfilerPauses.timed()
    def _open(self, window: TraceWindow, batch: int) -> None:
        """Opens a window after `batch` batches, starting with the profiler's warm-up."""
        # A call of several batches may have run past its start.
        delay = max(batch - window.begin, 0)
        self.window = TraceWindow(window.warmup, window.begin + delay, window.end + delay)
        if self.window.begin > batch:
            self._session = Session(self._log_dir)

    @ProfilerPauses.timed()
    def _begin(self, batch: int) -> None:
        """Starts recording. With one batch per call, a window has whole updates, and is postponed if one has begun."""
        assert self.window is not None
        updates = UpdateCount(self._model.optimizer)
        per_call = self._model.steps_per_execution
        if per_call == 1:
            length, each = self.window.end - self.window.begin, updates.batches_per_update
            begin = batch + updates.left if updates.position else batch
            self.window = TraceWindow(self.window.warmup, begin, begin + -(-length // each) * each)
            if begin > batch:
                return
        # What the warm-up traced isn't kept.
        if self._session is not None:
            self._session.discard()
        self._session = Session(self._log_dir)
        replicas = replica_placement(self._model.distribute_strategy).local
        self._markers = StepMarkers(updates, per_call, replicas)

    def pause(self, batch: int) -> None:
        """Closes the last step marker, as training pauses."""
        if self._markers is not None:
            self._markers.close(batch)

    @ProfilerPauses.timed()
    def close(self, batch: int) -> ProfileSummary | None:
        """Closes the window after `batch` batches, and writes and returns its summary; `None` if it had not begun."""
        self.pause(batch)
        session, markers = self._session, self._markers
        self._session = self._markers = self.window = None
        if session is None or markers is None:
            if session is not None:
                session.discard()
            return None
        folder = session.finish()
        self.traced += 1
        summary = self._read(folder, markers.memory.peaks())
        trace = folder.relative_to(self._log_dir).as_posix()
        summary = replace(summary, trace=trace, memory=summary.memory or markers.memory.samples())
        try:
            (folder / SUMMARY).write_text(json.dumps(summary.to_dict()), "utf-8")
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
        except Exception as error:
            found, fix = f"{type(error).__name__}: {error}", "pip install -U 'keras_paragrad[profile]'"
            problem = f"could not be read ({found}). Run {fix}."
            if isinstance(error, MissingExtraError):
                problem = f"was not read. {error}"
        note = f"The trace is in {folder}, but {problem}"
        if problem not in self._logged_problems:
            self._logged_problems.add(problem)
            _log.warning("%s", note)
        return ProfileSummary(run=self._run, peak_memory=peaks, notes=(note,))

    @ProfilerPauses.timed()
    def abandon(self) -> None:
        """Ends the open window and discards its trace."""
        session = self._session
        self._session = self._markers = self.window = None
        if session is not None:
            session.discard()
