"""The description of a training run in `run.json`."""

import datetime
import json
import logging
import platform
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import place_of, together_of
from keras_paragrad.distribution.hardware import logical_devices
from keras_paragrad.distribution.names import kind_of_device
from keras_paragrad.plain_json import read_json
from keras_paragrad.profiling.summary import RunInfo

_log = logging.getLogger("keras_paragrad")

FILE = "run.json"
_ALWAYS_THERE = {"model", "optimizer", "strategy", "replicas", "started"}


def run_info(model: keras.Model) -> RunInfo:
    """Describes a compiled model and its training setup.

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
    used = _used_devices(model, strategy)
    return RunInfo(
        model=model.name,
        optimizer=_named(model.optimizer),
        parameters=sum(int(np.prod(variable.shape)) for variable in model.trainable_variables),
        # The default strategy is a private class of TensorFlow.
        strategy="" if kind.startswith("_") else kind,
        replicas=strategy.num_replicas_in_sync,
        worker=place_of(together_of(model)).worker,
        jit=bool(getattr(model, "jit_compile", False)),
        steps_per_execution=model.steps_per_execution,
        precision=model.dtype_policy.name,
        devices=tuple(device.name for device in tf.config.list_logical_devices()),
        versions={"python": platform.python_version(), "keras": keras.__version__, "tensorflow": tf.__version__},
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        device_kind=kind_of_device(used[0]) if used else "",
        compute_capability=_least_capability(used),
    )


def write_run_info(log_dir: Path, info: RunInfo) -> None:
    """Writes `run.json`, on the first worker only. An existing file that is not ours is left alone.

    Args:
        log_dir: The log directory.
        info: The description of the run.

    Raises:
        OSError: It can't be written.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / FILE
    if path.exists() and not _is_ours(path):
        _log.warning(
            "%s was not written by keras_paragrad, and was not changed; a report describes the run by its windows "
            "instead. Give the callback its own log_dir.",
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


def _used_devices(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """The devices that hold the trainable variables, in short form: `GPU:0`."""
    variables: Any = [variable.value for variable in model.trainable_variables]
    held = [part.device for each in variables for part in strategy.experimental_local_results(each)]
    return sorted({device.rpartition("/device:")[2] for device in held if device})


def _least_capability(used: Collection[str]) -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs in use, or `None` if one is unknown."""
    found = [device.compute_capability for device in logical_devices() if device.kind == "GPU" and device.name in used]
    known = [each for each in found if each is not None]
    return min(known) if known and len(known) == len(found) else None


def _named(optimizer: Any) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{name}({_named(inner)})" if inner is not None else name
