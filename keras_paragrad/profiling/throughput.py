"""`Throughput`: training speed, memory and retraces during `fit`."""

import logging
import time
from array import array
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_paragrad.arguments import check_flag, check_integer, check_number, check_path
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import BatchIterator, Logs
from keras_paragrad.compat.workers import replica_placement, worker_strategy
from keras_paragrad.engine.telemetry.train_functions import TracedGraph, batch_spec, gradient_graph
from keras_paragrad.extras import explain_missing, is_installed
from keras_paragrad.flops import flops_of
from keras_paragrad.profiling.log_files import CsvFile, LogFiles
from keras_paragrad.profiling.memory import device_memory, host_memory
from keras_paragrad.profiling.pace import Clock, Pace, Retraces
from keras_paragrad.profiling.progress_line import hide_in_progress_bar
from keras_paragrad.profiling.session import ProfilerPauses

_log = logging.getLogger("keras_paragrad")
_LATEST_CALLS = 1000
_IN_BATCH_LOGS = ("examples_per_second", "step_time_p50_ms", "step_time_p95_ms", "mfu")
SHOWN = (
    *("examples_per_second", "updates_per_second", "step_time_p50_ms", "step_time_p95_ms", "time_to_first_step_s"),
    *("flops_per_step", "retraces", "host_memory_bytes", "device_memory_bytes", "mfu"),
)
# The names that the progress bar shows if they fit; it shows times itself.
_FEW = ("examples_per_second", "mfu")


class Throughput(keras.callbacks.Callback):
    """Reports training speed in `logs`, and so in `History`, in Keras's progress bar, and in files.

    A step is a batch. Its time runs from the end of the previous one, and includes the wait for data and all callbacks.
    Times and rates exclude validation, steps that trace or compile, and the time that `Profiler` takes to start and
    stop its windows. At the end of an epoch they are the epoch's. The progress bar shows `examples_per_second` and
    `mfu`, as far as the terminal is wide enough. As far as they can be determined, it reports:

    - `examples_per_second`, over all replicas and workers; `updates_per_second`.
    - `step_time_p50_ms`, `step_time_p95_ms`, within an epoch over its latest thousand calls of the train function.
    - `time_to_first_step_s`, from the start of training.
    - `retraces`: how often a graph was retraced; `retraces.csv` and the logger `keras_paragrad` have the shapes that
      caused it.
    - `host_memory_bytes`; `device_memory_bytes` on accelerators.
    - `flops_per_step`: of the matrix products and convolutions that the forward and backward pass need, without
      those that are recomputed. `mfu`: model FLOPs utilization, as a fraction of `peak_flops`.
    - `compile_s`, `profiler_s`, in `throughput.csv` only: how long the excluded parts took, at their steps.

    Args:
        log_dir: Where to write; nothing is written if `None`. Of several workers only the first writes.
        interval: Seconds between updates of the figures within an epoch: rates are of this time.
        peak_flops: Peak floating-point operations per second of all devices together.
        flops: Whether to count operations, which traces the model once more; by default, if `peak_flops` is set.
        batch_size: Examples per batch, for a `train_step` that doesn't update Keras's mean loss.

    Attributes:
        figures: The latest figures by name.

    Raises:
        ValueError: An argument is invalid.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import Throughput
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", loss="mse")
    >>> throughput = Throughput(flops=True)
    >>> history = model.fit(np.ones((320, 8)), np.ones((320, 1)), verbose=0, callbacks=[throughput])
    >>> history.history["examples_per_second"][0] > 0
    True
    >>> throughput.figures["flops_per_step"]  # 32 examples: 2 x 32 x 8 forward, and the same for the kernel's gradient
    1024.0

    Reference:
        Chowdhery et al., PaLM (2022), https://arxiv.org/abs/2204.02311, appendix B, on model FLOPs utilization.
    """

    # Lets Keras call `on_train_batch_end` from another thread, as for its own callbacks, so that nothing waits for it.
    async_safe = True
    changes_training = False

    def __init__(
        self,
        log_dir: str | PathLike[str] | None = None,
        *,
        interval: float = 1.0,
        peak_flops: float | None = None,
        flops: bool | None = None,
        batch_size: int | None = None,
    ):
        check_internals("models", "traced functions")
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir, directory=True, example="logs", optional=True)
        self.interval = check_number("interval", interval, above=0, example=1.0)
        self.peak_flops = check_number("peak_flops", peak_flops, above=0, example=1e12, optional=True)
        self.batch_size = check_integer("batch_size", batch_size, example=32, optional=True)
        flops = check_flag("flops", flops, optional=True)
        self.flops = peak_flops is not None if flops is None else flops
        self.figures: dict[str, float] = {}
        self._batch_logs: dict[str, float] = {}
        self._host_memory = is_installed("psutil")
        if not self._host_memory:
            _log.warning("%s", explain_missing("Throughput's host_memory_bytes", ["psutil"]))
        self._clock: Clock | None = None
        self._epoch_ended = True
        self._files: ThroughputFiles | None = None
        self._known_model: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts timing."""
        self._start = time.perf_counter()
        model = self.model
        resumes = self._known_model is model or int(model.optimizer.iterations.numpy()) > 0
        # `_first`: the first call hasn't ended. `_constants`: the figures that are measured once.
        self._known_model, self._first, self._constants = model, True, {}
        hide_in_progress_bar(model, SHOWN, _FEW)
        self._retraces, self._pace = Retraces(), Pace(model, self.batch_size)
        if self.log_dir is not None and replica_placement(worker_strategy(model)).worker == 0:
            self._files = ThroughputFiles(self.log_dir, resumes)
            self._files.describe(model)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts counting the epoch's steps."""
        # `_last_end`: when the last call ended, 0 before the epoch's first. `_last_time`: the time of a step in it.
        self._epoch, self._last_end, self._last_time, self._epoch_ended = epoch, 0.0, None, False
        self._times = array("d")
        self._pace.begin(time.perf_counter())
        self._pauses = ProfilerPauses.seconds

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Wraps the train function, or a new one that another callback has made, with the clock."""
        # Not `self.model`, a Keras property that checks the backend first: this runs in every step.
        function = self._known_model.train_function
        if function is not self._clock:
            function = function.function if isinstance(function, Clock) else function
            self._retraces.watch(function)
            self._per_call = self.model.steps_per_execution
            self.model.train_function = self._clock = Clock(function, self._on_call_end, self.on_train_end)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Adds the latest figures to the batch's logs."""
        if logs is not None:
            logs.update(self._batch_logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Updates the figures before validation counts its own examples."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Updates the figures, and adds them all to the epoch's logs."""
        self._end_epoch()
        if logs is not None:
            logs.update(self.figures)

    def _end_epoch(self) -> None:
        """Updates the figures once all steps of the epoch have run."""
        # `evaluate` calls this too, outside of an epoch.
        if self._epoch_ended or self._clock is None:
            return
        self._epoch_ended = True
        # If the data ended within the last call, it took fewer steps.
        if self._last_time and (self.params.get("steps") is not None or self._per_call == 1):
            self._times.append(self._last_time)
        self._refresh(self._last_end, of_epoch=True)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restores the train function, and closes the files."""
        if self._clock is not None and self.model.train_function is self._clock:
            self.model.train_function = self._clock.function
        self._clock = None
        if self._files:
            self._files.close()
            self._files = None

    def _on_call_end(self, iterator: BatchIterator, start: float, end: float) -> None:
        """Times a call of the train function, without compilation and profiling.

        The time counts when the next call ends: only then is it known that the call wasn't cut short by the data's end.
        """
        # This runs in every step.
        if self._last_time:
            self._times.append(self._last_time)
        steps, total = self._per_call, self.params.get("steps")
        if steps > 1 and total is not None:
            steps = max(1, min(steps, total - self._pace.steps))
        self._pace.steps += steps
        paused, self._pauses = ProfilerPauses.seconds - self._pauses, ProfilerPauses.seconds
        compiled = self._first or self._retraces.traced()
        self._last_time = None
        if compiled:
            self._pace.exclude(end - (self._last_end or self._pace.start), steps)
        else:
            self._last_time = (end - self._last_end - paused if self._last_end else end - start) / steps
            self._pace.exclude(paused)
        self._last_end = end
        if (compiled or paused) and self._files:
            excluded = {"compile_s": compiled * (end - start), "profiler_s": paused}
            excluded = {name: seconds for name, seconds in excluded.items() if seconds}
            self._files.append(self._pace.updates(), self._epoch, excluded, scalars=False)
        if compiled:
            self._after_compiling(iterator, end, steps)
        elif end - self._pace.start > self.interval:
            self._refresh(end, of_epoch=False)
        if total is not None and self._pace.steps >= total:
            # Callbacks before this one may evaluate the model at the end of the epoch.
            self._end_epoch()

    def _after_compiling(self, iterator: BatchIterator, end: float, steps: int) -> None:
        """Logs retraces; after the first call, records its time and the FLOPs of a step, and restarts the clock."""
        if retraced := self._retraces.take_retraced():
            for trace in retraced:
                _log.warning("%s was retraced, which takes time, for %s.", *trace)
            if self._files:
                self._files.append_retraces(self._pace.updates(), retraced)
        if not self._first:
            return
        self._first = False
        self._constants["time_to_first_step_s"] = end - self._start
        examples = self._pace.examples()
        rows = round(examples / steps) if examples else 0
        flops = self._count_flops(iterator, rows) if self.flops and rows else None
        if flops is not None:
            self._constants["flops_per_step"], self._flops_per_example = float(flops), flops / rows
        self._last_end = time.perf_counter()
        self._pace.begin(self._last_end, self._pace.steps)

    def _count_flops(self, iterator: BatchIterator, rows: int) -> int | None:
        """The FLOPs of a step, or `None` if it can't be traced."""
        try:
            spec = batch_spec(iterator)
            return None if spec is None else flops_of(gradient_graph(self.model, spec, rows))
        # This traces the user's model, whose errors must not end training.
        except Exception as error:
            log_once(self.model, f"Throughput can't count this model's FLOPs: {error}", logging.WARNING)
            return None

    def _refresh(self, now: float, *, of_epoch: bool) -> None:
        """Updates `figures` and the values for the batches' logs, and writes them to files."""
        rates = self._pace.rates(now, of_epoch=of_epoch)
        times = self._times if of_epoch else self._times[-_LATEST_CALLS:]
        p50, p95 = (np.percentile(times, (50, 95)) * 1e3).round(6).tolist() if times else (None, None)
        # A last, smaller batch counts as what it is.
        has_mfu = self.peak_flops and "flops_per_step" in self._constants and "examples_per_second" in rates
        figures = {
            **rates,
            "step_time_p50_ms": p50,
            "step_time_p95_ms": p95,
            **self._constants,
            "retraces": self._retraces.count,
            "host_memory_bytes": host_memory() if self._host_memory else None,
            "device_memory_bytes": device_memory(),
            "mfu": rates["examples_per_second"] * self._flops_per_example / self.peak_flops if has_mfu else None,
        }
        self.figures = {name: float(value) for name, value in figures.items() if value is not None}
        self._batch_logs = {name: self.figures[name] for name in _IN_BATCH_LOGS if name in self.figures}
        if self._files:
            self._files.append(self._pace.update, self._epoch, self.figures)


class ThroughputFiles(LogFiles):
    """Writes `throughput.csv`, `retraces.csv` and scalars into a log directory."""

    def __init__(self, log_dir: Path, resume: bool):
        super().__init__("Throughput", log_dir / "throughput.csv", ("quantity",), resume)
        path, columns = log_dir / "retraces.csv", ("step", "function", "signature")
        self._retraces: Any = self._safely(lambda: CsvFile(path, columns, resume))

    def append(self, step: int, epoch: int, figures: Mapping[str, float], *, scalars: bool = True) -> None:
        """Writes figures, by name, to the table, and as scalars."""
        rows = [(step, epoch, name, f"{value:.12g}") for name, value in figures.items()]
        self._safely(lambda: self._table.append(rows))
        if scalars:
            tags, values = [f"throughput/{name}" for name in figures], np.array([list(figures.values())], float)
            self._safely(lambda: self._scalars.append(np.array([step]), tags, values))

    def append_retraces(self, step: int, traces: Iterable[TracedGraph]) -> None:
        self._safely(lambda: self._retraces.append((step, *trace) for trace in traces))
