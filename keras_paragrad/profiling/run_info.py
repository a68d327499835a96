"""What is being trained, as `run.json` has it."""

import datetime
import json
import logging
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.workers import place_of
from keras_paragrad.plain_json import read_json
from keras_paragrad.profiling.summary import RunInfo

_log = logging.getLogger("keras_paragrad")

FILE = "run.json"
_ALWAYS_THERE = {"model", "optimizer", "strategy", "replicas", "started"}


def run_info(model: keras.Model) -> RunInfo:
    """Describes a compiled model and what it is trained with.

    Args:
        model: A model that has been built and compiled.

    Example:

    >>> import keras
    >>> from keras_paragrad.profiling.run_info import run_info
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile("adam", loss="mse")
    >>> info = run_info(model)
    >>> info.optimizer, info.parameters, info.replicas, info.strategy
    ('Adam', 10, 1, '')
    """
    strategy = model.distribute_strategy
    kind = type(strategy).__name__
    return RunInfo(
        model=model.name,
        optimizer=_named(model.optimizer),
        parameters=sum(int(np.prod(variable.shape)) for variable in model.trainable_variables),
        # Where there is none, TensorFlow has a private one.
        strategy="" if kind.startswith("_") else kind,
        replicas=strategy.num_replicas_in_sync,
        worker=place_of(strategy).worker,
        jit=bool(getattr(model, "jit_compile", False)),
        steps_per_execution=model.steps_per_execution,
        precision=model.dtype_policy.name,
        devices=tuple(device.name for device in tf.config.list_logical_devices()),
        versions={"python": platform.python_version(), "keras": keras.__version__, "tensorflow": tf.__version__},
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def write_run_info(log_dir: Path, info: RunInfo) -> None:
    """Writes `run.json`; the first worker does. A file of that name that is not ours is left as it is.

    Args:
        log_dir: The log directory.
        info: What is trained.

    Raises:
        OSError: It can't be written.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / FILE
    if path.exists() and not _is_ours(path):
        _log.warning(
            "%s is not a file of keras_paragrad, and is left as it is: a report takes what was run from its windows. "
            "Give the callback a log_dir of its own.",
            path,
        )
        return
    path.write_text(json.dumps(asdict(info), indent=1), "utf-8")


def _is_ours(path: Path) -> bool:
    try:
        found = read_json(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= _ALWAYS_THERE


def _named(optimizer: Any) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{name}({_named(inner)})" if inner is not None else name
