"""Sinks for reports: a table and TensorBoard. A full disk ends the writing, not the training."""

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_choice
from keras_paragrad.extras import require
from keras_paragrad.profiling.telemetry.report import QUANTITIES, Reports, Weight
from keras_paragrad.profiling.telemetry.tables import Table

_number = itertools.count()


class Scalars:
    """Writes scalars for TensorBoard, one report at a time.

    Writes event records directly: through `tf.summary` a report takes eight times as long.

    Args:
        log_dir: TensorBoard's log directory.
        suffix: The end of the file's name.
    """

    def __init__(self, log_dir: Path, suffix: str):
        log_dir.mkdir(parents=True, exist_ok=True)
        # TensorBoard's convention: later files sort after earlier ones.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_number)}{suffix}"
        self._writer = tf.io.TFRecordWriter(str(log_dir / name))
        self._write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._writer.flush()

    def append(self, steps: np.ndarray, tags: Sequence[str], values: np.ndarray) -> None:
        """Writes reports.

        Args:
            steps: The step of each report, shape `(reports,)`.
            tags: The scalars' names.
            values: Shape `(reports, len(tags))`.
        """
        now = time.time()
        for step, row in zip(steps.tolist(), values.tolist(), strict=True):
            event = tf.compat.v1.Event(wall_time=now, step=step)
            add = event.summary.value.add
            for tag, value in zip(tags, row, strict=True):
                add(tag=tag, simple_value=value)
            self._write(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, event: tf.compat.v1.Event) -> None:
        self._writer.write(event.SerializeToString())


_log = logging.getLogger("keras_paragrad")


class Guarded:
    """Calls functions that write files, until one fails; logs the failure once.

    Args:
        what: What is written, for the message.
    """

    def __init__(self, what: str):
        self.what, self.works = what, True

    def __call__(self, write: Callable[[], Any]) -> Any:
        """Returns what `write` returns, or `None` if it could not."""
        if not self.works:
            return None
        try:
            return write()
        except (OSError, tf.errors.OpError) as error:
            self.works = False
            _log.warning("%s is no longer written, and training continues: %s", self.what, error)
            return None


class Sinks:
    """Writes reports into a log directory.

    Args:
        log_dir: The directory.
        file_format: `"csv"` or `"parquet"`.
        resume: Whether an existing table belongs to the same training.
    """

    def __init__(self, log_dir: Path, file_format: str, resume: bool) -> None:
        self._guarded = Guarded(f"Telemetry in {log_dir}")
        path = log_dir / f"telemetry.{file_format}"
        self._table: Any = self._guarded(lambda: Table(path, ("layer", "variable", "quantity"), resume))
        self._scalars: Any = self._guarded(lambda: Scalars(log_dir, ".telemetry"))
        self._labels: list[tuple[str, ...]] = []
        self._tags: list[str] = []

    def name(self, weights: Sequence[Weight], layers: Sequence[str]) -> None:
        """Names the reported weights and their layers; called before `append`."""
        model = ("gradient_norm", "clipped_gradient_norm", "loss_scale", "learning_rate")
        self._labels = [("", "", name) for name in model]
        self._labels += [(*weight, name) for name in QUANTITIES for weight in weights]
        self._tags = [f"telemetry/{name}" for name in (*model, "update_ratio", "nonfinite")]
        self._tags += [f"telemetry_{name}/{layer}" for name in QUANTITIES for layer in layers]

    def append(self, reports: Reports) -> None:
        """Writes reports."""
        self._guarded(lambda: self._append(reports))

    def close(self) -> None:
        """Closes the files."""
        for sink in (self._table, self._scalars):
            if sink is not None:
                # Also after a failure: nothing must stay open.
                Guarded(self._guarded.what)(sink.close)

    def _append(self, reports: Reports) -> None:
        model = reports.model
        head = [model.gradient_norm, model.clipped_gradient_norm, reports.loss_scale, reports.learning_rate]
        rows = np.concatenate([np.stack(head, 1), *reports.weights], 1)
        self._table.append(reports.steps, reports.epochs, self._labels, rows)
        head += [model.update_ratio, model.nonfinite]
        self._scalars.append(reports.steps, self._tags, np.concatenate([np.stack(head, 1), *reports.layers], 1))


def check_format(file_format: str) -> str:
    """Validates the format, and that the package that writes it is installed."""
    chosen = check_choice("file_format", file_format, ("csv", "parquet"))
    if chosen == "parquet":
        require("file_format='parquet'", "pyarrow", instead="write file_format='csv'")
    return chosen
