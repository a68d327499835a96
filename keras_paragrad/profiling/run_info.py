"""What is being trained, as `run.json` has it."""

import datetime
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.workers import place_of
from keras_paragrad.profiling.summary import RunInfo

FILE = "run.json"


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
    """Writes `run.json`; the first worker does.

    Args:
        log_dir: The log directory.
        info: What is trained.

    Raises:
        OSError: It can't be written.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / FILE).write_text(json.dumps(asdict(info), indent=1), "utf-8")


def _named(optimizer: Any) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{name}({_named(inner)})" if inner is not None else name
