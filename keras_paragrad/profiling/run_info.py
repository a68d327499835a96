"""The description of a training run in `run.json`."""

import datetime
import json
import logging
import platform
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import replica_placement, worker_strategy
from keras_paragrad.distribution.hardware import kind_of_device, logical_devices
from keras_paragrad.plain_text import read_json
from keras_paragrad.profiling.summary import RunInfo

_log = logging.getLogger("keras_paragrad")

FILE = "run.json"
_REQUIRED_KEYS = {"model", "optimizer", "strategy", "replicas", "started"}


def run_info(model: keras.Model) -> RunInfo:
    """Describes a built and compiled model, and its training setup."""
    strategy = model.distribute_strategy
    kind = type(strategy).__name__
    devices = _devices_of(model, strategy)
    return RunInfo(
        model=model.name,
        optimizer=_optimizer_name(model.optimizer),
        parameters=sum(int(np.prod(variable.shape)) for variable in model.trainable_variables),
        # The default strategy is a private class of TensorFlow.
        strategy="" if kind.startswith("_") else kind,
        replicas=strategy.num_replicas_in_sync,
        worker=replica_placement(worker_strategy(model)).worker,
        jit=bool(getattr(model, "jit_compile", False)),
        steps_per_execution=model.steps_per_execution,
        precision=model.dtype_policy.name,
        devices=tuple(device.name for device in tf.config.list_logical_devices()),
        versions={"python": platform.python_version(), "keras": keras.__version__, "tensorflow": tf.__version__},
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        device_kind=kind_of_device(devices[0]) if devices else "",
        compute_capability=_least_capability(devices),
    )


def write_run_info(log_dir: Path, info: RunInfo) -> None:
    """Writes `run.json`; an existing file that is not ours is left alone.

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
        content = read_json(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= _REQUIRED_KEYS


def _devices_of(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """The devices that hold the trainable variables, in short form: `GPU:0`."""
    variables = [variable.value for variable in model.trainable_variables]
    names = [part.device for each in variables for part in strategy.experimental_local_results(each)]
    return sorted({device.rpartition("/device:")[2] for device in names if device})


def _least_capability(devices: Collection[str]) -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs in use, or `None` if one is unknown."""
    gpus = [device for device in logical_devices() if device.kind == "GPU" and device.name in devices]
    known = [device.compute_capability for device in gpus if device.compute_capability is not None]
    return min(known) if known and len(known) == len(gpus) else None


def _optimizer_name(optimizer: keras.optimizers.Optimizer) -> str:
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return f"{name}({_optimizer_name(inner)})" if inner is not None else name
