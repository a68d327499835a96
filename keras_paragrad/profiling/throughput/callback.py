"""`Throughput`: training speed, memory and retraces during `fit`."""

import logging
import time
from os import PathLike
from typing import Any

import keras

from keras_paragrad.arguments import check_flag, check_integer, check_number, check_path
from keras_paragrad.compat.local import place_of, together_of
from keras_paragrad.engine.telemetry.counts import batch_spec, gradient_graph
from keras_paragrad.flops import flops_of
from keras_paragrad.profiling.memory import can_read_host_memory, device_memory, host_memory
from keras_paragrad.profiling.stops import Stops
from keras_paragrad.profiling.throughput.files import Files, collective_share
from keras_paragrad.profiling.throughput.pace import Pace
from keras_paragrad.profiling.throughput.train_function import Clock, Retraces, StepTimes

_log = logging.getLogger("keras_paragrad")
_SHOWN = ("examples_per_second", "step_time_p50_ms", "step_time_p95_ms", "mfu")


class Throughput(keras.callbacks.Callback):
    """Reports training speed in `logs`, and so in Keras's progress bar, and in files.

    A step is a batch. Its time runs from the end of the previous one, and includes the wait for data and all callbacks.
    Times and rates exclude validation, steps that trace or compile, and the time that `Profiler` takes to start and
    stop its windows. Reported are, as far as they can be determined:

    - `examples_per_second`, over all replicas and workers; `updates_per_second`.
    - `step_time_p50_ms`, `step_time_p95_ms`, over the latest thousand calls of the train function.
    - `time_to_first_step_s`, from the beginning of training.
    - `retraces`: how often a graph was retraced; `retraces.csv` and the logger
      `keras_paragrad` give the shapes that caused it.
    - `host_memory_bytes`; `device_memory_bytes` on accelerators.
    - `flops_per_step`: those of the matrix products and convolutions in the forward and backward pass. `mfu`: model
      FLOPs utilization, as a fraction of `peak_flops`.
    - `collective_share`: from the newest profile in `log_dir`.
    - `compile_s`, `profiler_s`, in `throughput.csv` only: how long the excluded parts took, at their steps.

    Args:
        log_dir: Where to write; nothing is written if `None`. Of several workers only the first writes.
        interval: Seconds between updates of the figures. They are also updated at the end of each epoch.
        peak_flops: Peak floating-point operations per second of all devices together.
        flops: Whether to count operations, which takes another trace of the model. By default, if `peak_flops` is
            given.
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

    def __init__(
        self,
        log_dir: str | PathLike[str] | None = None,
        *,
        interval: float = 1.0,
        peak_flops: float | None = None,
        flops: bool | None = None,
        batch_size: int | None = None,
    ):
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir, directory=True, example="logs", optional=True)
        self.interval = check_number("interval", interval, above=0, example=1.0)
        self.peak_flops = check_number("peak_flops", peak_flops, above=0, example=1e12, optional=True)
        self.batch_size = check_integer("batch_size", batch_size, example=32, optional=True)
        counts = check_flag("flops", flops, optional=True)
        self.flops = peak_flops is not None if counts is None else counts
        self.figures: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._host_memory = can_read_host_memory()
        self._clock: Clock | None = None
        self._is_over = True
        self._files: Files | None = None
        self._known: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts timing."""
        self._began = time.perf_counter()
        model: Any = self.model
        resumes = self._known is model or int(model.optimizer.iterations.numpy()) > 0
        self._known, self._first, self._fixed = model, True, {}
        self._times, self._retraces, self._pace = StepTimes(), Retraces(), Pace(model, self.batch_size)
        if self.log_dir is not None and place_of(together_of(model)).worker == 0:
            self._files = Files(self.log_dir, resumes)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts counting the epoch's steps."""
        self._epoch, self._ended, self._last, self._is_over = epoch, 0.0, None, False
        self._pace.begin(time.perf_counter())
        self._stops = Stops.seconds

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Wraps the train function with the clock, also a new one that another callback has made."""
        # Not `self.model`, a Keras property that checks the backend first: this runs in every step.
        function = self._known.train_function
        if function is not self._clock:
            inside = function.function if isinstance(function, Clock) else function
            self._retraces.watch(inside)
            self._per_call = self.model.steps_per_execution
            self.model.train_function = self._clock = Clock(inside, self._on_call_end, self._remove_clock)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the latest figures to the batch's logs."""
        if logs is not None:
            logs.update(self._shown)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Updates the figures before validation counts its own examples."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the figures, and adds them all to the epoch's logs."""
        self._end_epoch()
        if logs is not None:
            logs.update(self.figures)

    def _end_epoch(self) -> None:
        """Updates the figures once all steps of the epoch have run."""
        # No epoch is running where `evaluate` is called with this callback.
        if self._is_over or self._clock is None:
            return
        self._is_over = True
        # The last call may have taken fewer steps, if the data ended within it.
        if self._last and (self.params.get("steps") is not None or self._per_call == 1):
            self._times.add(self._last)
        if self._ended:
            self._refresh(self._ended)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files and removes the clock."""
        self._remove_clock()

    def _remove_clock(self) -> None:
        if self._clock is not None and self.model.train_function is self._clock:
            self.model.train_function = self._clock.function
        self._clock = None
        if self._files:
            self._files.close()
            self._files = None

    def _on_call_end(self, iterator: Any, began: float, ended: float) -> None:
        # This runs in every step.
        if self._last:
            self._times.add(self._last)
        steps = self._per_call if self._per_call == 1 else self._steps_of_call()
        self._pace.steps += steps
        stopped, self._stops = Stops.seconds - self._stops, Stops.seconds
        # Compilation happens once, and is not part of the pace.
        compiled = self._first or self._retraces.happened()
        self._last = None
        if compiled:
            self._pace.exclude(ended - (self._ended or self._pace.began), steps)
        else:
            self._last = (ended - self._ended - stopped if self._ended else ended - began) / steps
            self._pace.exclude(stopped)
        self._ended = ended
        if compiled or stopped:
            self._write_excluded(compile_s=compiled * (ended - began), profiler_s=stopped)
        if compiled:
            self._compiled(iterator, ended, steps)
        elif ended - self._pace.began > self.interval:
            self._refresh(ended)
        if (left := self.params.get("steps")) is not None and self._pace.steps >= left:
            # Other callbacks may evaluate the model before it is this one's turn.
            self._end_epoch()

    def _write_excluded(self, **seconds: float) -> None:
        if self._files:
            found = {name: value for name, value in seconds.items() if value}
            self._files.excluded(self._pace.updates(), self._epoch, found)

    def _steps_of_call(self) -> int:
        left = self.params.get("steps")
        return self._per_call if left is None else max(1, min(self._per_call, left - self._pace.steps))

    def _compiled(self, iterator: Any, ended: float, steps: int) -> None:
        again = self._retraces.look()
        if again:
            self._report_retraces(again)
        if self._first:
            self._first_call(iterator, ended, steps)

    def _first_call(self, iterator: Any, ended: float, steps: int) -> None:
        self._first = False
        self._fixed["time_to_first_step_s"] = ended - self._began
        examples = self._pace.examples()
        flops = self._count(iterator, examples / steps) if self.flops and examples else None
        if flops is not None:
            self._fixed["flops_per_step"] = float(flops)
        self._ended = time.perf_counter()
        self._pace.begin(self._ended, self._pace.steps)

    def _count(self, iterator: Any, examples: float) -> int | None:
        try:
            spec = batch_spec(iterator)
            return None if spec is None else flops_of(gradient_graph(self.model, spec, round(examples)))
        # This traces the user's model, whose errors must not end training.
        except Exception as error:
            _log.warning("Throughput can't count this model's FLOPs: %s", error)
            return None

    def _report_retraces(self, again: Any) -> None:
        for trace in again:
            _log.warning("%s was retraced, which takes time, for %s.", *trace)
        if self._files:
            self._files.retraced(self._pace.updates(), again)

    def _refresh(self, now: float) -> None:
        rates = self._pace.rates(now)
        steps = rates.pop("steps_per_second", None)
        p50, p95 = self._times.percentiles()
        flops = self._fixed.get("flops_per_step")
        found = {
            **rates,
            "step_time_p50_ms": p50 if p50 == p50 else None,
            "step_time_p95_ms": p95 if p95 == p95 else None,
            **self._fixed,
            "retraces": self._retraces.count,
            "host_memory_bytes": host_memory() if self._host_memory else None,
            "device_memory_bytes": device_memory(),
            "mfu": flops * steps / self.peak_flops if flops and steps and self.peak_flops else None,
            "collective_share": collective_share(self.log_dir) if self.log_dir else None,
        }
        self.figures = {name: float(value) for name, value in found.items() if value is not None}
        self._shown = {name: self.figures[name] for name in _SHOWN if name in self.figures}
        if self._files:
            self._files.append(self._pace.update, self._epoch, self.figures)
