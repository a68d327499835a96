"""`GradientTelemetry`: per-layer gradient, weight and update statistics during `fit`."""

import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import keras
import numpy as np

from keras_paragrad.arguments import check_integer, check_number, check_path
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.model import optimizers_of, overrides_train_step
from keras_paragrad.compat.optimizer import clips_gradients
from keras_paragrad.compat.types import Logs
from keras_paragrad.compat.workers import replica_placement, worker_strategy
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.profiling.log_files import LogFiles
from keras_paragrad.profiling.meter import Meter
from keras_paragrad.profiling.progress_line import hide_in_progress_bar
from keras_paragrad.profiling.telemetry_reports import HEADER, QUANTITIES, Alarms, ReportReader, Reports, Weight

_log = logging.getLogger("keras_paragrad")
# The names in `logs`, and the ones that the progress bar shows if they fit.
SHOWN = ("gradient_norm", "update_ratio", "nonfinite_gradients", "clipped_gradient_norm", "loss_scale")
_FEW = ("gradient_norm",)
# What makes an epoch's value of its reports', where that isn't their mean.
_IN_EPOCH: dict[str, Callable[[list[float]], float]] = {
    "nonfinite_gradients": sum,
    "loss_scale": operator.itemgetter(-1),
}
# Reports are processed in batches of this many, or after this many seconds.
_MOST_PENDING, _FLUSH_SECONDS = 32, 2.0


class GradientTelemetry(keras.callbacks.Callback):
    """Reports each layer's gradient, weight and update norms during `fit`, and warns about unhealthy layers.

    The gradient is the one that updates the weights: the whole batch's, summed over replicas and accumulated
    micro-batches, without loss scale, before and after clipping. It is measured in a separate compiled step, which the
    host selects for the reported updates only, so the others cost nothing. If a custom `train_step` uses
    several optimizers, a report covers the last update of each, and takes its step number from the one called last.

    `logs` gets `gradient_norm`, `update_ratio` and `nonfinite_gradients` of the whole model, `clipped_gradient_norm` if
    the optimizer clips, and `loss_scale` if it scales the loss: of the latest report, and at the end of an epoch the
    means over its reports, the sum of `nonfinite_gradients`, and the last `loss_scale`. Keras's progress bar shows
    `gradient_norm` alone, where the terminal is wide enough. With a `log_dir`, per-weight
    values go to `telemetry.csv`, and per-layer values to TensorBoard. The logger
    `keras_paragrad` warns once per layer and kind if a gradient vanishes, explodes, is zero or is not finite.

    Args:
        log_dir: Where to write; nothing is written if `None`. Of several workers only the first writes.
        every: Report every `every`-th update. With `steps_per_execution`, only the last of those within a call.
        vanishing: A layer's gradient vanishes if its norm is below this fraction of the largest layer's, in `patience`
            consecutive reports.
        exploding: A layer's gradient explodes if its norm exceeds this many times the median over layers, or this many
            times the geometric mean of its own earlier norms.
        patience: How many consecutive reports a gradient has to vanish, or be zero, before a warning.

    Attributes:
        layers: The layers with trainable weights, by path, in the model's order.
        last: The latest `keras_paragrad.profiling.telemetry_reports.Reports`, of up to 32 updates, or `None`.

    Raises:
        ValueError: An argument is invalid, or, in `fit`, a custom `train_step` updates weights with an
            optimizer that is not an attribute of the model. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import GradientTelemetry
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    >>> model.compile("sgd", loss="mse")
    >>> telemetry = GradientTelemetry(every=2)
    >>> x = np.random.default_rng(0).normal(size=(320, 8))
    >>> history = model.fit(x, x[:, :1], verbose=0, callbacks=[telemetry])  # ten updates
    >>> telemetry.last.layers.gradient_norm.shape, telemetry.last.steps
    ((5, 2), array([ 2,  4,  6,  8, 10]))
    """

    # Lets Keras call `on_train_batch_end` from another thread, as for its own callbacks, so that nothing waits for it.
    async_safe = True

    def __init__(
        self,
        log_dir: str | PathLike[str] | None = None,
        every: int = 10,
        *,
        vanishing: float = 1e-6,
        exploding: float = 1e3,
        patience: int = 3,
    ):
        check_internals("models", "steps")
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir, directory=True, example="logs", optional=True)
        self.every = check_integer("every", every, example=10)
        self.vanishing = check_number("vanishing", vanishing, least=0, below=1, example=1e-6)
        # Infinity disables the warning.
        self.exploding = check_number("exploding", exploding, above=1, finite=False, example=1e3)
        self.patience = check_integer("patience", patience, example=3)
        self.layers: tuple[str, ...] = ()
        self._recent: deque[tuple[np.ndarray, int]] = deque(maxlen=_MOST_PENDING)
        self._meter: Meter | None = None
        self._measured_optimizer: keras.optimizers.Optimizer | None = None
        self._files: TelemetryFiles | None = None
        # What batches' logs get, and the same of each report of the epoch.
        self._logs: dict[str, float] = {}
        self._reported_logs: list[dict[str, float]] = []
        self._epoch = 0
        # Whether it was logged why no update was reported.
        self._explained = False

    @property
    def last(self) -> Reports | None:
        if not self._recent:
            return None
        vectors, epochs = zip(*self._recent, strict=True)
        return self._reader.read(np.stack(vectors), epochs)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts measuring updates; a second `fit` of the same model continues the same files."""
        model = self.model
        builder = StepBuilder.of(model)
        if builder.stages.telemetry is not None:
            raise ValueError("There are two GradientTelemetry callbacks. Remove one: each reports all layers.")
        resumes = self._start() or self._updates() > 0
        self._files = None
        if self.log_dir is not None and replica_placement(worker_strategy(model)).worker == 0:
            self._files = TelemetryFiles(self.log_dir, resumes)
            self._files.set_weights(self._reader.weights, self.layers)
            self._files.describe(model)
        self._vectors: list[np.ndarray] = []
        self._epochs: list[int] = []
        self._flushed = time.monotonic()
        self._updates_at_begin, self._ran, self._reported = self._updates(), False, False
        builder.begin_fit(self._fillers)
        hide_in_progress_bar(model, SHOWN, _FEW)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Records the epoch."""
        self._epoch, self._ran, self._reported_logs = epoch, True, []
        if self._meter:
            self._meter.begin()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Adds the values of the latest report to the batch's logs."""
        if logs is not None:
            logs.update(self._logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the values of the epoch's reports to its logs, and writes all pending reports."""
        if self._meter:
            self._meter.read()
            self._flush()
        if logs is not None and self._reported_logs:
            values = {name: [each[name] for each in self._reported_logs] for name in self._logs}
            logs.update({name: float(_IN_EPOCH.get(name, np.mean)(each)) for name, each in values.items()})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Closes the files, logs if there was nothing to report, and restores the model's training step."""
        self._flush()
        if self._ran and not self._reported and not self._explained:
            self._explained = True
            _log.warning("GradientTelemetry reported no update: %s", self._why_no_update())
        if self._files:
            self._files.close()
        StepBuilder.of(self.model).end_fit(self._fillers)

    def _fillers(self) -> dict[str, object]:
        """The meter for the step's *telemetry* stage; called again if the model is compiled during `fit`."""
        if self._measured_optimizer is not self.model.optimizer:
            self._flush()
            self._start()
        return {"telemetry": self._meter}

    def _start(self) -> bool:
        """Creates a meter for the model and its optimizer; returns whether there was one already."""
        model, optimizer = self.model, self.model.optimizer
        known = self._meter is not None and self._meter.is_of(model) and self._measured_optimizer is optimizer
        if not known:
            self._recent.clear()
            self._meter = Meter(model, self.every, self._on_update, self._on_weights_known)
            self._measured_optimizer = optimizer
            optimizers = optimizers_of(model) if overrides_train_step(model) else [optimizer]
            self._clips = any(map(clips_gradients, optimizers))
            self._scales = any(isinstance(inner, keras.optimizers.LossScaleOptimizer) for inner in optimizers)
        return known

    def _on_weights_known(self, weights: list[Weight]) -> None:
        """Called by the meter when the measured weights become known or change: rebuilds all that depends on them."""
        self._reader = ReportReader(weights)
        self.layers = self._reader.layers
        self._alarms = Alarms(self.layers, self.vanishing, self.exploding, self.patience)
        if self._files:
            self._files.set_weights(self._reader.weights, self.layers)
            self._files.describe(self.model)

    def _updates(self) -> int:
        return self._meter.updates() if self._meter else 0

    def _why_no_update(self) -> str:
        """Why no update was measured, as the end of a sentence."""
        model = self.model
        before, now = self._updates_at_begin, self._updates()
        if not model.trainable_variables:
            return "the model has no trainable weights."
        if now == before:
            skipped = " A LossScaleOptimizer skips updates whose gradient overflows." if self._scales else ""
            return (
                f"the model's optimizer, {model.optimizer.name!r}, made none.{skipped} Only its updates are measured: "
                "call self.optimizer.apply in your train_step."
            )
        if now // self.every == before // self.every:
            return f"none of the updates {before + 1} to {now} is a multiple of every={self.every}. Write every=1."
        return f"updates {before + 1} to {now} were made outside the training step, where they can't be measured."

    def _on_update(self, vector: np.ndarray) -> None:
        """Buffers a measured vector, and takes the logs from it.

        After the values of `HEADER`, the vector has a row for each of `QUANTITIES`, with one value per weight: squared
        norms of the gradient, of the clipped gradient, of the weight and of its change, and the non-finite count.
        """
        self._reported = True
        self._recent.append((vector, self._epoch))
        self._vectors.append(vector)
        self._epochs.append(self._epoch)
        sums = vector[len(HEADER) :].reshape(len(QUANTITIES), -1).sum(1).tolist()
        logs = {
            "gradient_norm": sums[0] ** 0.5,
            "update_ratio": (sums[3] / sums[2]) ** 0.5 if sums[2] else float("nan"),
            "nonfinite_gradients": sums[4],
        }
        if self._clips:
            logs["clipped_gradient_norm"] = sums[1] ** 0.5
        if self._scales:
            logs["loss_scale"] = float(vector[2])
        self._reported_logs.append(logs)
        # Assign in one step; another thread may be reading it.
        self._logs = logs
        if len(self._vectors) >= _MOST_PENDING or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        """Writes the buffered measurements, and warns of what the alarms find in them."""
        self._flushed = time.monotonic()
        if not self._vectors:
            return
        reports = self._reader.read(np.stack(self._vectors), self._epochs)
        self._vectors, self._epochs = [], []
        for message in self._alarms.check(reports.steps, reports.layers.gradient_norm, reports.layers.nonfinite):
            _log.warning("GradientTelemetry: %s", message)
        if self._files:
            self._files.append(reports)


class TelemetryFiles(LogFiles):
    """Writes reports into a log directory: a table of weights, and scalars of layers and of the model."""

    def __init__(self, log_dir: Path, resume: bool) -> None:
        columns = ("layer", "variable", "quantity")
        super().__init__("Telemetry", log_dir / "telemetry.csv", columns, resume)
        self._labels: list[tuple[str, ...]] = []
        self._tags: list[str] = []

    def set_weights(self, weights: Sequence[Weight], layers: Sequence[str]) -> None:
        """Sets the reported weights and their layers, before `append`."""
        model = ("gradient_norm", "clipped_gradient_norm", "loss_scale", "learning_rate")
        self._labels = [("", "", name) for name in model]
        self._labels += [(*weight, name) for name in QUANTITIES for weight in weights]
        self._tags = [f"telemetry/{name}" for name in (*model, "update_ratio", "nonfinite")]
        self._tags += [f"telemetry_{name}/{layer}" for name in QUANTITIES for layer in layers]

    def append(self, reports: Reports) -> None:
        """Writes reports as rows of the table and as scalars."""
        model = reports.model
        head = [model.gradient_norm, model.clipped_gradient_norm, reports.loss_scale, reports.learning_rate]
        values = np.concatenate([np.stack(head, 1), *reports.weights], 1).tolist()
        # Nine digits already distinguish any two 32-bit floats; seventeen take three times as long.
        rows = (
            (step, epoch, *label, f"{value:.12g}")
            for step, epoch, of_report in zip(reports.steps, reports.epochs, values, strict=True)
            for label, value in zip(self._labels, of_report, strict=True)
        )
        self._safely(lambda: self._table.append(rows))
        head += [model.update_ratio, model.nonfinite]
        scalars = np.concatenate([np.stack(head, 1), *reports.layers], 1)
        self._safely(lambda: self._scalars.append(reports.steps, self._tags, scalars))
