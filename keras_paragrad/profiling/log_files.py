"""Files in log directories: `run.json`, tables, TensorBoard scalars. A full disk ends the writing, not `fit`."""

import csv
import datetime
import itertools
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import replica_placement, worker_strategy
from keras_paragrad.distribution.hardware import kind_of_device, logical_devices
from keras_paragrad.plain_text import read_json
from keras_paragrad.profiling.summary import RunInfo

Result = TypeVar("Result")

_log = logging.getLogger("keras_paragrad")
# Distinguish the event files of this process.
_file_numbers = itertools.count()


class CsvFile:
    """A CSV file that is complete after every `append`; with `resume`, it keeps the rows that it has."""

    def __init__(self, path: Path, columns: Sequence[str], resume: bool):
        self._path, header, start = path, ",".join(columns) + "\n", b""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb") as file:
                start = file.read(len(header))
        if start not in (b"", header.encode()):
            raise FileExistsError(
                f"{path} already exists with other columns, and was not changed. Give the callback its own log_dir"
            )
        if not (resume and start):
            path.write_text(header, encoding="utf-8", newline="")

    def append(self, rows: Iterable[Iterable[object]]) -> None:
        """Adds rows of values."""
        # Opened each time: an aborted training leaves no file open.
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


class Scalars:
    """Writes scalars for TensorBoard as event records; through `tf.summary`, a report takes eight times as long."""

    def __init__(self, log_dir: Path, suffix: str):
        log_dir.mkdir(parents=True, exist_ok=True)
        # TensorBoard's convention: later files sort after earlier ones.
        name = (
            f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}{suffix}"
        )
        self._writer = tf.io.TFRecordWriter(str(log_dir / name))
        self._writer.write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writer.flush()

    def append(self, steps: np.ndarray, tags: Sequence[str], values: np.ndarray) -> None:
        """Writes reports: `steps` has the shape `(reports,)`, `values` `(reports, len(tags))`."""
        now = time.time()
        for step, row in zip(steps.tolist(), values.tolist(), strict=True):
            event = tf.compat.v1.Event(wall_time=now, step=step)
            add = event.summary.value.add
            for tag, value in zip(tags, row, strict=True):
                add(tag=tag, simple_value=value)
            self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class LogFiles:
    """The table and the scalars of a callback in a log directory, which nothing is written to after a failure."""

    def __init__(self, name: str, table: Path, labels: Sequence[str], resume: bool):
        self._name, self._log_dir, self._failed = name, table.parent, False
        self._table: Any = self._safely(lambda: CsvFile(table, ("step", "epoch", *labels, "value"), resume))
        self._scalars: Any = self._safely(lambda: Scalars(self._log_dir, f".{table.stem}"))

    def describe(self, model: keras.Model) -> None:
        """Writes `run.json`: the model, as far as it is built, and its setup."""
        self._safely(lambda: write_run_info(self._log_dir, run_info(model)))

    def close(self) -> None:
        """Closes the file of the scalars, even after a failure."""
        if self._scalars is not None:
            self._failed = False
            self._safely(self._scalars.close)

    def _safely(self, write: Callable[[], Result]) -> Result | None:
        """Returns the result of `write`, or `None` after a failure, which is logged once."""
        if self._failed:
            return None
        try:
            return write()
        except (OSError, tf.errors.OpError) as error:
            self._failed = True
            _log.warning("%s in %s is no longer written, and training continues: %s", self._name, self._log_dir, error)
            return None


FILE = "run.json"
_REQUIRED_KEYS = {"model", "optimizer", "strategy", "replicas", "started"}


def run_info(model: keras.Model) -> RunInfo:
    """Describes a built and compiled model, and its training setup."""
    strategy = model.distribute_strategy
    placement = replica_placement(worker_strategy(model))
    kind = type(strategy).__name__
    devices = _devices_of(model, strategy)
    gpus = [device for device in logical_devices() if device.kind == "GPU" and device.name in devices]
    capabilities = [device.compute_capability for device in gpus if device.compute_capability is not None]
    return RunInfo(
        model=model.name,
        optimizer=_optimizer_name(model.optimizer),
        parameters=sum(int(np.prod(variable.shape)) for variable in model.trainable_variables),
        # The default strategy is a private class of TensorFlow.
        strategy="" if kind.startswith("_") else kind,
        replicas=strategy.num_replicas_in_sync,
        worker=placement.worker,
        workers=placement.workers,
        jit=bool(getattr(model, "jit_compile", False)),
        steps_per_execution=model.steps_per_execution,
        precision=model.dtype_policy.name,
        devices=tuple(device.name for device in tf.config.list_logical_devices()),
        versions={"python": platform.python_version(), "keras": keras.__version__, "tensorflow": tf.__version__},
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        device_kind=kind_of_device(devices[0]) if devices else "",
        # The lowest, if those of all GPUs in use are known.
        compute_capability=min(capabilities) if capabilities and len(capabilities) == len(gpus) else None,
    )


def write_run_info(log_dir: Path, info: RunInfo) -> None:
    """Writes `run.json`; an existing file that is not ours is left alone."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / FILE
    try:
        content = read_json(path.read_text("utf-8")) if path.exists() else dict.fromkeys(_REQUIRED_KEYS)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.keys() >= _REQUIRED_KEYS:
        path.write_text(json.dumps(asdict(info), indent=1), "utf-8")
    else:
        _log.warning(
            "%s was not written by keras_paragrad, and was not changed; a report describes the run by its windows "
            "instead. Give the callback its own log_dir.",
            path,
        )


def _devices_of(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """The devices that hold the trainable variables, in short form: `GPU:0`."""
    variables = [variable.value for variable in model.trainable_variables]
    names = [part.device for each in variables for part in strategy.experimental_local_results(each)]
    return sorted({device.rpartition("/device:")[2] for device in names if device})


def _optimizer_name(optimizer: keras.optimizers.Optimizer) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{name}({_optimizer_name(inner)})" if inner is not None else name
