"""Tries batches in processes of their own: what is sent there, how it is watched, and what is learned."""

import contextlib
import importlib
import importlib.util
import json
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
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import quote
from keras_paragrad.compat.data import is_grain
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.memory.available import available_bytes, resident_bytes
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.storage.model_variables import STEP_BUILDER

# Seconds between looks at the memory of a trial, in which it can take some 50 MB more.
_INTERVAL = 0.005
# The share of the available memory that a trial may take with all that its process takes.
_MOST = 0.95
_LIBRARIES = {"builtins", "keras", "keras_paragrad", "numpy", "tensorflow"}


class CannotTryError(Exception):
    """A model can't be tried in another process. The message says why, as the end of a sentence."""


class Trials:
    """Trains a model for some steps in processes of their own, and measures what that takes.

    Args:
        model: The model, compiled and built. It is not changed.
        data: Some rows of `x`, `y` and `sample_weight`, as nested arrays.
        device_bytes: The bytes that training may take.
        steps: Number of steps.
        preparations: The calls that prepare the model, as module, name and keyword arguments; by default those in
            effect.

    Raises:
        CannotTryError: The model can't be made again elsewhere.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Structure,
        device_bytes: int,
        steps: int,
        preparations: list[tuple[str, str, dict[str, Any]]] | None = None,
    ):
        self._model, self._device_bytes = model, device_bytes
        self._preparations = preparations_of(model) if preparations is None else preparations
        with untouched(model, never_run()), _refusing(), warnings.catch_warnings():
            # Of lambdas in it.
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

    def bytes_of(self, rows: int, preparations: Iterable[tuple[str, str, dict[str, Any]]] = ()) -> int | None:
        """The bytes at the peak of training on batches of `rows`; `None` if they ran out.

        Args:
            rows: The rows of a batch.
            preparations: More calls that prepare the model.

        Raises:
            CannotTryError: The model can't be made again there, or its step fails for another reason than memory.
        """
        request = {**self._request, "rows": rows, "preparations": [*self._preparations, *preparations]}
        with tempfile.TemporaryDirectory(prefix="keras_paragrad_") as name:
            directory = Path(name)
            (directory / "request.pickle").write_bytes(_pickled(request))
            self._save_assets(directory)
            status = self._run(directory)
            if (directory / "result.json").exists():
                result = json.loads((directory / "result.json").read_text())
                if "problem" in result:
                    raise CannotTryError(f"in a process of its own it fails: {result['problem']}")
                return result["bytes"]
            printed = (directory / "output.txt").read_text(errors="replace")
        if status == -signal.SIGKILL or (status == -signal.SIGABRT and "alloc" in printed):
            # By the kernel, by `_run`, or by what allocates.
            return None
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "nothing was printed")
        raise CannotTryError(f"a process of its own ended with status {status}: {last.strip()[:300]}")

    def _save_assets(self, directory: Path) -> None:
        """Saves what layers need besides their config, such as vocabularies."""
        with _refusing():
            for index, layer in enumerate(all_layers(self._model)):
                if hasattr(layer, "save_assets"):
                    (directory / f"assets_{index}").mkdir()
                    layer.save_assets(str(directory / f"assets_{index}"))

    def _run(self, directory: Path) -> int:
        """Runs the process until it ends, or takes too much; returns its exit status."""
        safe = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *safe, "-m", "keras_paragrad.memory.trial_process", str(directory)]
        # It must not join this process's cluster, and imports what this one does.
        environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
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
                most = min(
                    _MOST * free if free is not None else float("inf"),
                    # A GPU's memory is counted by TensorFlow.
                    base + self._device_bytes if base else float("inf"),
                )
                if (resident_bytes(process.pid) or 0) > most:
                    process.kill()
        finally:
            process.kill()
            process.wait()
        return process.returncode


def _base(directory: Path) -> int | None:
    try:
        return json.loads((directory / "base.json").read_text())
    except (OSError, ValueError):  # not yet, or not all of it
        return None


@contextlib.contextmanager
def _refusing() -> Generator[None]:
    """Context in which whatever code of the model's own raises means that it can't be tried."""
    try:
        yield
    except Exception as error:
        raise CannotTryError(f"it can't be described for another process: {error}") from error


def preparations_of(model: keras.Model, without: str | None = None) -> list[tuple[str, str, dict[str, Any]]]:
    """The calls that have prepared a model for training.

    Args:
        model: The model.
        without: A stage of the step to leave out.

    Raises:
        CannotTryError: One of them can't be made again.
    """
    calls = [("keras_paragrad.memory.recomputation", "recompute", each) for each in RECOMPUTATIONS.of(model)]
    builder = STEP_BUILDER.of(model)
    for name, filler in builder.fillers.items() if builder else ():
        if name == without:
            continue
        preparation = getattr(filler, "preparation", None)
        if preparation is None:
            raise CannotTryError(f"what prepared its {name!r} stage can't be repeated in another process")
        calls.append(preparation)
    return calls


def custom_objects_of(model: keras.Model) -> dict[str, Any]:
    """The classes and functions of others in a model, by the names in its config."""
    found: dict[str, Any] = {}
    seen: dict[int, object] = {}
    pending: list[Any] = [model]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, (list, tuple, set)):
            pending += each
        elif isinstance(each, (type, types.FunctionType)):
            if each.__module__.partition(".")[0] not in _LIBRARIES and each.__name__ != "<lambda>":
                found |= {each.__name__: each, keras.saving.get_registered_name(each): each}
        elif hasattr(each, "get_config"):
            pending += [type(each), *getattr(each, "__dict__", {}).values()]
    return found


def _pickled(request: dict[str, Any]) -> bytes:
    """The request as bytes, with the code that another process can't import, if cloudpickle is installed."""
    if importlib.util.find_spec("cloudpickle"):
        with _refusing():
            return importlib.import_module("cloudpickle").dumps(request)
    objects = request["custom_objects"].values()
    here = [each.__name__ for each in objects if each.__module__ == "__main__" or "<locals>" in each.__qualname__]
    if here:
        raise CannotTryError(
            f"{', '.join(dict.fromkeys(here))} can't be imported in another process. Define it in a module, or install "
            "cloudpickle"
        )
    with _refusing():
        return pickle.dumps(request)


def first_rows(x: Any, y: Any, most: int) -> tuple[Structure, Structure, Structure, int | None]:
    """Some rows of the data of `fit`, as nested arrays: of `x`, `y` and `sample_weight`; and how many rows there are.

    Raises:
        ValueError: It is a generator, or has other rows than arrays do.
    """
    whole = False
    if isinstance(x, tf.data.Dataset) or is_grain(x):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iter(x)))
    elif isinstance(x, keras.utils.PyDataset):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(x[0])
    elif hasattr(x, "__next__"):
        raise ValueError(
            "`x` is a generator, which would lose the rows that are tried. Pass arrays, such as those of one batch."
        )
    else:
        sample_weight = None
        x = np.asarray(x) if isinstance(x, list) and x and isinstance(x[0], str) else x
        whole = True
    try:
        count = len(keras.tree.flatten(x)[0]) if whole else None
        arrays = [keras.tree.map_structure(lambda leaf: _rows(leaf, most), each) for each in (x, y, sample_weight)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`x` and `y` have to be arrays, or a dataset of dense batches: {error}") from error
    return arrays[0], arrays[1], arrays[2], count


def _rows(leaf: Any, most: int) -> Any:
    if leaf is None:
        return None
    rows = np.asarray(leaf[:most])
    if rows.dtype == object and not all(isinstance(each, (str, bytes)) for each in rows.flat):
        raise TypeError(f"found {quote(leaf)}")
    return rows
