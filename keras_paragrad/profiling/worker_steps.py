"""Times each worker's batches in the windows of a schedule, and how long it waits for other workers.

A window is a range of batches. A call of the train function runs `steps_per_execution` batches.
"""

import csv
import time
from pathlib import Path
from typing import NamedTuple

import keras

from keras_paragrad.compat.wait_clock import WaitClock
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.profiling.log_files import begin_csv
from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.summary import WORKER_FILES

COLUMNS = ("window", "batch", "milliseconds", "waiting")


class _Call(NamedTuple):
    """A call of the train function that has begun."""

    batch: int
    begin: float


class WorkerSteps:
    """Times this worker's batches, in every window of the schedule, into a separate file.

    Args:
        model: The model, trained by a strategy of several workers.
        log_dir: Where the file goes.
        schedule: The windows.
    """

    def __init__(self, model: keras.Model, log_dir: Path, schedule: ProfileSchedule):
        strategy = model.distribute_strategy
        clock = WaitClock.of(strategy)
        if clock is None:
            clock = WaitClock.attach(strategy)
            # A step that was traced before has no clock.
            model.make_train_function(force=True)
        self._clock, self._schedule = clock, schedule
        self._index = 0
        self._call: _Call | None = None
        self._rows: list[tuple[int, int, float, float]] = []
        self._path = log_dir / WORKER_FILES.replace("*", str(replica_placement(strategy).worker))
        log_dir.mkdir(parents=True, exist_ok=True)
        begin_csv(self._path, COLUMNS, resume=False)

    def next_due(self, batch: int) -> float:
        """The batch count at which `advance` has to be called next; 0, which is past, within a window."""
        window = self._schedule.window(self._index)
        if self._call is not None or window is None:
            return 0 if self._call is not None else float("inf")
        return window.begin

    def advance(self, batch: int) -> None:
        """Before a call, after `batch` batches: times the previous call, and begins to time this one if one is due."""
        was_timing = self._call is not None
        self.pause(batch)
        window = self._schedule.window(self._index)
        if window is not None and batch >= window.end:
            self._index += 1
            self._clock.switch(on=False)
            self._write()
            window = self._schedule.window(self._index)
        if window is None or batch < window.begin:
            return
        if not was_timing:
            self._clock.switch(on=True)
        self._call = _Call(batch, time.perf_counter())

    def pause(self, batch: int) -> None:
        """Times the last call, after which `batch` batches have run, as the next one begins or training pauses."""
        if self._call is None:
            return
        milliseconds, waiting = 1e3 * (time.perf_counter() - self._call.begin), 1e3 * self._clock.read()
        count = batch - self._call.batch
        for index in range(count):
            self._rows.append((self._index, self._call.batch + index, milliseconds / count, waiting / count))
        self._call = None

    def close(self, batch: int) -> None:
        """Writes the times, as training ends."""
        self.pause(batch)
        self._clock.switch(on=False)
        self._write()

    def _write(self) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                (window, batch, f"{milliseconds:.6g}", f"{waiting:.6g}")
                for window, batch, milliseconds, waiting in self._rows
            )
        self._rows = []
