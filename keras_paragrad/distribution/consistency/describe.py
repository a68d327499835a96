"""All that shapes a training, as JSON that two workers can compare and a person can read."""

import functools
import json
import os
import platform
import re
import sys
import warnings
import zlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import with_those_of_updates
from keras_paragrad.compat.model import all_layers, compile_arguments
from keras_paragrad.engine.losses.terms import bound_arguments
from keras_paragrad.engine.step.segments import describe_recomputed

# Arguments of `fit` that hold data, which is compared where it is read: here only which of them are given.
_DATA = ("x", "y", "sample_weight", "validation_data")
# How data is read, and how much is shown.
_NOT_COMPARED = ("verbose", "callbacks", "cache", "prefetch", "seed", "self", "model")
# Keys of configs that may differ. Seeds: initial values are the first worker's, and dropout draws different numbers on
# each replica anyway. How a layer was built depends on its first batch; the shapes of weights are compared instead.
_LEFT_OUT = {
    *("verbose", "filepath", "filename", "log_dir", "directory", "path", "root", "shared_object_id", "seed"),
    *("registered_name", "module", "build_config", "build_input_shape", "compile_config"),
}
# Where configs have names of layers.
_REFERENCES = ("name", "keras_history", "input_layers", "output_layers")
# Attributes that Keras gives models and callbacks, some with automatic names in them.
_OF_KERAS = {"name", "model", "params", "input_names", "output_names", "optimizer", "history"}
_COMPARED = (
    *(bool, int, float, type(None), np.generic, np.ndarray, np.ufunc, FunctionType, BuiltinFunctionType),
    *(keras.losses.Loss, keras.regularizers.Regularizer, keras.optimizers.Optimizer),
)
_ONLY_SHOW = (
    *(keras.callbacks.History, keras.callbacks.ProgbarLogger, keras.callbacks.CSVLogger),
    keras.callbacks.RemoteMonitor,
)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that determine what is computed."""
    names = ("keras", "tensorflow", "numpy", "keras_paragrad")
    packages = {name: str(getattr(sys.modules.get(name), "__version__", None) or version(name)) for name in names}
    return {"python": "{}.{}".format(*sys.version_info), **packages}


def describe_kernels() -> dict[str, str]:
    """What determines results bit for bit: the processor, the threads of an operation, the GPUs and the libraries."""
    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
    return {
        "processor": _processor(),
        "threads of an operation": str(_threads()),
        "GPUs": ", ".join(sorted(set(names))) or "none",
        "oneDNN": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as installed"),
        "tensorflow": tf.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _threads() -> int:
    """The number of CPU threads that a TensorFlow operation may use."""
    stated = tf.config.threading.get_intra_op_parallelism_threads() or int(
        os.environ.get("TF_NUM_INTRAOP_THREADS") or 0
    )
    return stated or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def describe_training(
    model: keras.Model, options: Mapping[str, object] | None = None, arguments: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """All that shapes a worker's training by sections, in JSON, equal on workers that train the same."""
    names = ("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch")
    settings = {name: getattr(keras.config, name)() for name in names}
    description: dict[str, Any] = {
        "versions": versions(),
        "keras": {**settings, "dtype_policy": keras.config.dtype_policy().name},
        "DistributedFit": dict(options or {}),
    }
    if arguments is not None:
        named = {name: value for name, value in arguments.items() if name not in (*_DATA, *_NOT_COMPARED)}
        data = {name: "given" if arguments.get(name) is not None else "not given" for name in _DATA}
        description["fit"] = {**named, **data}
        callbacks = with_those_of_updates(keras.tree.flatten(arguments.get("callbacks") or []))
        description["callbacks"] = [_class_and_attributes(each) for each in callbacks if can_change_training(each)]
    described = to_json({**description, **_describe_model(model)})
    return _renumber(described, set(re.findall(r'"class_name": "(\w+)"', json.dumps(described).lower())), {})


def can_change_training(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is one of Keras's or of this package that can change what is computed, or derived from one.

    This package's callbacks that can't are marked by `changes_training = False`. Custom ones may be on one worker only;
    what they change is found at the end of an epoch.
    """
    base = next(base for base in type(callback).__mro__ if is_of_a_library(base))
    if issubclass(base, _ONLY_SHOW) or not getattr(base, "changes_training", True):
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        # Then it reads weights, which takes all workers.
        return bool(getattr(callback, "histogram_freq", 0) or getattr(callback, "embeddings_freq", 0))
    return base not in (keras.callbacks.Callback, keras.callbacks.LambdaCallback)


def is_of_a_library(definition: Any) -> bool:
    """Whether the code of a class or function is determined by the version of a library."""
    package = str(definition.__module__).partition(".")[0]
    return package in ("keras", "tensorflow", "numpy", "builtins", "keras_paragrad")


def to_json(value: Any) -> Any:
    """A value as JSON: Keras objects by class and config, functions and other objects by name."""
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        value = value.numpy()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return "a path" if os.sep in str(value) else str(value)
    if isinstance(value, Mapping):
        # Keras serializes a lambda as its bytecode, defaults and closure.
        code = value["value"] if value.keys() == {"value"} else None
        is_lambda = isinstance(code, tuple) and len(code) == 3 and isinstance(code[0], str)
        items = {str(key): to_json(item) for key, item in value.items() if key not in _LEFT_OUT}
        return "<lambda>" if is_lambda else items
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray):
        checksum = f"checksum {zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"
        return value.tolist() if value.size <= 4 else f"{value.dtype} of shape {value.shape}, {checksum}"
    if isinstance(value, (tf.Tensor, tf.Variable, keras.Variable)):
        # Variables are compared with the weights, and symbolic tensors have no value.
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (tf.DType, np.dtype, tf.TensorShape, bytes, complex, set, frozenset)):
        return str(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)
    if isinstance(value, functools.partial):
        return to_json({"class_name": "partial", "function": value.func, "args": value.args, **value.keywords})
    if callable(value) and hasattr(value, "__name__"):
        return getattr(value, "__qualname__", value.__name__)
    # Keras leaves the bound arguments out of the config of some losses and metrics, such as Huber.
    config = to_json({**bound_arguments(value), **_config_of(value)})
    description = {"class_name": type(value).__name__, "config": config}
    return description if is_of_a_library(type(value)) else {**description, "attributes": _attributes(value)}


def _config_of(value: Any) -> dict[str, Any]:
    """An object's Keras config; empty if it has none, or getting it fails."""
    with warnings.catch_warnings():
        # Keras warns of lambdas.
        warnings.simplefilter("ignore")
        try:
            return dict(value.get_config())
        except Exception:  # noqa: BLE001 - a user's code, whose attributes are compared
            return {}


def _attributes(value: object) -> dict[str, Any]:
    """The public attributes of plain types that an object has beyond its Keras base class's attributes."""
    base = next((base for base in (keras.Model, keras.layers.Layer) if isinstance(value, base)), None)
    known = _OF_KERAS | (_attributes_of_a_plain(base) if base else frozenset[str]())
    names = [name for name in sorted(getattr(value, "__dict__", {})) if not name.startswith("_") and name not in known]
    return to_json({name: vars(value)[name] for name in names if _is_compared(vars(value)[name])})


def _class_and_attributes(value: object) -> dict[str, Any]:
    return {"class_name": type(value).__name__, **_attributes(value)}


@functools.cache
def _attributes_of_a_plain(base: type) -> frozenset[str]:
    return frozenset(vars(base()))


def _is_compared(value: object) -> bool:
    """Whether an attribute of this value is expected to be equal on all workers."""
    if isinstance(value, str):
        return os.sep not in value
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_compared, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, _COMPARED)


def _describe_model(model: keras.Model) -> dict[str, Any]:
    """A compiled model: its layers and how they are connected, its weights' shapes, optimizer, loss and metrics."""
    config, layers, optimizer = _config_of(model), all_layers(model), model.optimizer
    arguments = {name: argument for name, argument in compile_arguments(model).items() if name != "optimizer"}
    # The config of a Functional or Sequential model contains its layers' configs, without attributes.
    configs = config.pop("layers", None)
    custom = [component for component in (model, *(layers if configs else ())) if not is_of_a_library(type(component))]
    recomputed = describe_recomputed(model).items()
    return {
        "model": {"class_name": type(model).__name__, "config": config},
        "layers": configs or layers,
        "attributes": [_class_and_attributes(component) for component in custom],
        "optimizer": optimizer,
        "updates so far": int(optimizer.iterations.numpy()) if optimizer else 0,
        "variables of the optimizer": len(optimizer.variables) if optimizer else 0,
        "compile": {**arguments, "jit_compile": bool(model.jit_compile)},
        "recompute": {"model" if index < 0 else f"layer {index}": how for index, how in recomputed},
        "weights": [
            f"{weight.dtype} of shape {tuple(weight.shape)}{'' if weight.trainable else ', not trained'}"
            for weight in model.variables
        ],
    }


def _renumber(value: Any, classes: set[str], numbers: dict[str, str], refers: bool = False) -> Any:
    """Numbers automatic names in order of appearance: `dense_7` and `dense_8` become `dense` and `dense#1`.

    A worker that has made another model before counts from a higher number. `refers` says that `value` is where configs
    have names. A name is automatic if it is the name of one of `classes`, in lower case.
    """
    if isinstance(value, list):
        return [_renumber(item, classes, numbers, refers) for item in value]
    if isinstance(value, dict):
        return {key: _renumber(item, classes, numbers, refers or key in _REFERENCES) for key, item in value.items()}
    stem = re.sub(r"_\d+$", "", value) if refers and isinstance(value, str) else ""
    if stem.replace("_", "") not in classes:
        return value
    if value not in numbers:
        count = sum(name.partition("#")[0] == stem for name in numbers.values())
        numbers[value] = f"{stem}#{count}" if count else stem
    return numbers[value]
