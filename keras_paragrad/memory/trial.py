"""Tries batches in child processes: sends the model there, watches the memory, and returns the measured peak."""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.memory.available import STEP_SHARE, available_bytes, resident_bytes
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.storage.model_variables import STEP_BUILDER

_log = logging.getLogger("keras_paragrad")
# Polling interval, in seconds; meanwhile a trial can allocate some 50 MB more.
_INTERVAL = 0.005
# The share of the available memory that a trial's process may take in all.
_MOST = 0.95
_LIBRARIES = {"builtins", "keras", "keras_paragrad", "numpy", "tensorflow"}


class PreparationCall(NamedTuple):
    """A call of a module's function that prepares a model, repeated in a trial's process."""

    module: str
    function: str
    arguments: dict[str, Any]


class CannotTryError(Exception):
    """A model can't be tried in another process. The message says why, as the end of a sentence."""


def warn_untried(asked_by: str, model: str, problem: CannotTryError) -> None:
    """Warns that the estimate alone decides, as a model can't be tried."""
    percent, words = round(100 * STEP_SHARE), str(problem).rstrip(".")
    _log.warning(
        "%s relies on the memory estimate for %r alone, and fills at most %d%% of the memory: %s.",
        asked_by,
        model,
        percent,
        words,
    )


@dataclass(frozen=True)
class Measured:
    """What a trial took: bytes at the peak on a device, and seconds of a step after the first."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Runner:
    """What builds and trains the model in a trial, in place of plain Keras.

    `make(**arguments)` returns an object with a context `scope()` to build the model in, and `fit(model, ...)`.

    Attributes:
        module, make: The module and the name of the function or class that makes it.
        arguments: The arguments of `make`.
        devices: Number of devices that it trains on.
    """

    module: str
    make: str
    arguments: dict[str, Any]
    devices: int


class Trials:
    """Trains a model for some steps in child processes, and measures their memory.

    Args:
        model: The model, compiled and built. It is not changed.
        data: Some rows of `x`, `y` and `sample_weight`, as nested arrays.
        device_bytes: The bytes that training may take.
        steps: Number of steps.

    Raises:
        CannotTryError: The model can't be rebuilt in another process.
    """

    def __init__(self, model: keras.Model, data: Structure, device_bytes: int, steps: int):
        self._model, self._device_bytes = model, device_bytes
        self._preparations = preparations_of(model)
        with untouched(model, never_run()), _refusing(), warnings.catch_warnings():
            # Keras warns about lambdas in the model.
            warnings.simplefilter("ignore")
            config = keras.saving.serialize_keras_object(model)
        self._request = {
            "model": config,
            "custom_objects": custom_objects_of(model),
            "data": data,
            "steps": steps,
            "device_bytes": device_bytes,
            "gpus": [gpu.name for gpu in tf.config.get_visible_devices("GPU")],
            "floatx": keras.config.floatx(),
            "image_data_format": keras.config.image_data_format(),
            "dtype_policy": keras.config.dtype_policy().name,
        }

    def bytes_of(self, rows: int) -> int | None:
        """The bytes at the peak of training on batches of `rows`; `None` if they ran out. See `measure`."""
        measured = self.measure(rows)
        return measured and measured.bytes

    def measure(
        self, rows: int, preparations: Iterable[PreparationCall] = (), runner: Runner | None = None
    ) -> Measured | None:
        """What training on batches of `rows` takes; `None` if memory ran out.

        Args:
            rows: The rows of a batch.
            preparations: More calls that prepare the model.
            runner: What builds and trains it, in place of Keras.

        Raises:
            CannotTryError: The model can't be rebuilt there, or its step fails for another reason than memory.
        """
        request = {**self._request, "rows": rows, "preparations": [*self._preparations, *preparations]}
        request["runner"] = None if runner is None else dataclasses.asdict(runner)
        devices = 1 if runner is None else runner.devices
        with tempfile.TemporaryDirectory(prefix="keras_paragrad_") as name:
            directory = Path(name)
            (directory / "request.pickle").write_bytes(_pickled(request))
            self._save_assets(directory)
            status = self._run(directory, devices)
            if (directory / "result.json").exists():
                result = json.loads((directory / "result.json").read_text())
                if "problem" in result:
                    raise CannotTryError(f"in a separate process it fails: {result['problem']}")
                return None if result["bytes"] is None else Measured(result["bytes"], result["seconds"])
            printed = (directory / "output.txt").read_text(errors="replace")
        if status == -signal.SIGKILL or (status == -signal.SIGABRT and "alloc" in printed):
            # Killed by the kernel, by `_run`, or by its own allocator.
            return None
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "nothing was printed")
        raise CannotTryError(f"a separate process ended with status {status}: {last.strip()[:300]}")

    def _save_assets(self, directory: Path) -> None:
        """Saves the assets that layers need besides their config, such as vocabularies."""
        with _refusing():
            for index, layer in enumerate(all_layers(self._model)):
                if hasattr(layer, "save_assets"):
                    (directory / f"assets_{index}").mkdir()
                    layer.save_assets(str(directory / f"assets_{index}"))

    def _run(self, directory: Path, devices: int) -> int:
        """Runs the process until it ends, or kills it if it takes too much on its devices; returns its exit status."""
        safe = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *safe, "-m", "keras_paragrad.memory.trial_process", str(directory)]
        # The trial must not join this process's cluster, and imports from the same paths.
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        free, base = available_bytes(), None
        with (directory / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            while process.poll() is None:
                time.sleep(_INTERVAL)
                base = _base(directory) if base is None else base
                limit = min(
                    _MOST * free if free is not None else float("inf"),
                    # A GPU's memory is counted by TensorFlow.
                    base + devices * self._device_bytes if base else float("inf"),
                )
                if (resident_bytes(process.pid) or 0) > limit:
                    process.kill()
        finally:
            process.kill()
            process.wait()
        return process.returncode


def _base(directory: Path) -> int | None:
    """The bytes that the trial's process took before it made the model; `None` until it has measured them."""
    try:
        return json.loads((directory / "base.json").read_text())
    except (OSError, ValueError):  # not yet, or not all of it
        return None


@contextlib.contextmanager
def _refusing() -> Generator[None]:
    """Context in which an error raised by the user's code means that the model can't be tried."""
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise CannotTryError(f"it can't be described for another process: {words}") from error


def preparations_of(model: keras.Model) -> list[PreparationCall]:
    """The calls that prepared a model for training; raises `CannotTryError` for one that can't be repeated."""
    calls = [
        PreparationCall("keras_paragrad.memory.recomputation", "recompute", call) for call in RECOMPUTATIONS.of(model)
    ]
    builder = STEP_BUILDER.of(model)
    for name, filler in builder.fillers.items() if builder else ():
        preparation = getattr(filler, "preparation", None)
        if preparation is None:
            raise CannotTryError(f"what prepared its {name!r} stage can't be repeated in another process")
        calls.append(preparation)
    return calls


def custom_objects_of(model: keras.Model) -> dict[str, Any]:
    """The user's classes and functions in a model, by their names in its config."""
    found: dict[str, Any] = {}
    seen: dict[int, object] = {}
    pending: list[Any] = [model]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set)):
            pending += value
        elif isinstance(value, (type, types.FunctionType)):
            if value.__module__.partition(".")[0] not in _LIBRARIES and value.__name__ != "<lambda>":
                found |= {value.__name__: value, keras.saving.get_registered_name(value): value}
        elif hasattr(value, "get_config"):
            # Keras replaces methods by functions that hold their layer, under the user's names.
            own = getattr(value, "__dict__", {}).items()
            pending += [type(value), *(item for name, item in own if not callable(getattr(type(value), name, None)))]
    return found


def _pickled(request: dict[str, Any]) -> bytes:
    """Pickles the request; with cloudpickle, if it is installed, which includes code that can't be imported."""
    if importlib.util.find_spec("cloudpickle"):
        with _refusing():
            return importlib.import_module("cloudpickle").dumps(request)
    objects = request["custom_objects"].values()
    local = [item.__name__ for item in objects if item.__module__ == "__main__" or "<locals>" in item.__qualname__]
    if local:
        raise CannotTryError(
            f"{', '.join(dict.fromkeys(local))} can't be imported in another process. Define it in a module, or "
            "install cloudpickle"
        )
    with _refusing():
        return pickle.dumps(request)
