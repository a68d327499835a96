"""All that shapes a training, as JSON that two workers can compare and a person can read."""

import functools
import inspect
import os
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from types import BuiltinFunctionType, FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import with_those_of_updates
from keras_paragrad.compat.model import all_layers, compile_arguments
from keras_paragrad.engine.losses.terms import bound_arguments
from keras_paragrad.engine.step.segments import describe_recomputed

_LIBRARIES = ("keras", "tensorflow", "numpy", "builtins", "keras_paragrad")
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
# Where configs refer to layers by name.
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
    return {"python": "{}.{}".format(*sys.version_info), **{name: _version(name) for name in names}}


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", None) or version(name))


def describe_training(
    model: keras.Model, options: Mapping[str, object] | None = None, arguments: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """All that shapes a worker's training, equal on workers that train the same.

    It covers the versions of Python and the packages, Keras's settings, `DistributedFit`'s decisions, the configs of
    the model's layers and how they are connected, the optimizer, the loss, the metrics, the arguments of `fit`, and the
    callbacks that can change the training. Functions are compared by name, and custom classes by name, config and
    public attributes. Seeds, paths and `verbose` are left out, and automatic names are numbered anew.
    """
    description: dict[str, Any] = {"versions": versions(), "keras": _settings(), "DistributedFit": dict(options or {})}
    if arguments is not None:
        named = {name: value for name, value in arguments.items() if name not in (*_DATA, *_NOT_COMPARED)}
        data = {name: "given" if arguments.get(name) is not None else "not given" for name in _DATA}
        description["fit"] = {**named, **data}
        callbacks = with_those_of_updates(keras.tree.flatten(arguments.get("callbacks") or []))
        description["callbacks"] = _attributes_by_class(filter(can_change_training, callbacks))
    return _renumber_automatic_names(to_json({**description, **_describe_model(model)}))


def bind_arguments(function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, including defaults."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name))
    return arguments


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


def is_of_a_library(kind: type) -> bool:
    """Whether the code of a class is determined by the version of a library."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


def to_json(value: Any) -> Any:
    """A value as JSON: Keras objects by class and config, functions and other objects by name."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        value = value.numpy()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, (str, os.PathLike)):
        return "a path" if os.sep in str(value) else str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        if _is_lambda(value):
            return "<lambda>"
        return {str(key): to_json(item) for key, item in value.items() if key not in _LEFT_OUT}
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
    return _describe_object(value)


def _is_lambda(config: Mapping[str, object]) -> bool:
    """Whether Keras has serialized a lambda, as its bytecode."""
    code = config["value"] if config.keys() == {"value"} else None
    return config.get("class_name") == "__lambda__" or (
        isinstance(code, tuple) and len(code) == 3 and isinstance(code[0], str)
    )


def _describe_object(value: object) -> dict[str, Any]:
    """An object by its class and config, and by its attributes if the class is custom."""
    # Keras leaves the bound arguments out of the config of some losses and metrics, such as Huber.
    config = {**bound_arguments(value), **(_config_of(value) or {})}
    description = {"class_name": type(value).__name__, "config": to_json(config)}
    return description if is_of_a_library(type(value)) else {**description, "attributes": _attributes(value)}


def _config_of(value: Any) -> dict[str, Any] | None:
    """An object's Keras config; `None` if it has none, or getting it fails."""
    with warnings.catch_warnings():
        # Keras warns of lambdas.
        warnings.simplefilter("ignore")
        try:
            config = value.get_config()
        except Exception:  # noqa: BLE001 - a user's code, whose attributes are compared
            return None
    return config if isinstance(config, dict) else None


def _attributes(value: object) -> dict[str, Any]:
    """The public attributes of plain types that an object has beyond its Keras base class's attributes."""
    base = next((base for base in (keras.Model, keras.layers.Layer) if isinstance(value, base)), None)
    known = _OF_KERAS | (_attributes_of_a_plain(base) if base else frozenset[str]())
    fields = getattr(value, "__dict__", {})
    attributes = {
        name: attribute for name, attribute in fields.items() if not name.startswith("_") and name not in known
    }
    return to_json({name: attribute for name, attribute in sorted(attributes.items()) if _is_compared(attribute)})


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


def _attributes_by_class(objects: Iterable[object]) -> dict[str, Any]:
    """The attributes of objects by the name of their class, with a number from the second of a class."""
    attributes: dict[str, Any] = {}
    for instance in objects:
        name = type(instance).__name__
        count = sum(other.partition(" ")[0] == name for other in attributes)
        attributes[f"{name} {count + 1}" if count else name] = _attributes(instance)
    return attributes


def _describe_model(model: keras.Model) -> dict[str, Any]:
    """A compiled model: its layers and how they are connected, its weights' shapes, optimizer, loss and metrics."""
    config, layers, optimizer = dict(_config_of(model) or {}), all_layers(model), model.optimizer
    arguments = {name: argument for name, argument in compile_arguments(model).items() if name != "optimizer"}
    # The config of a Functional or Sequential model contains its layers' configs, without attributes.
    configs = config.pop("layers", None)
    custom = [component for component in (model, *(layers if configs else ())) if not is_of_a_library(type(component))]
    return {
        "model": {"class_name": type(model).__name__, "config": config},
        "layers": configs or layers,
        "attributes": _attributes_by_class(custom),
        "optimizer": optimizer,
        "updates so far": int(optimizer.iterations.numpy()) if optimizer else 0,
        "variables of the optimizer": len(optimizer.variables) if optimizer else 0,
        "compile": {**arguments, "jit_compile": bool(model.jit_compile)},
        "recompute": {
            "model" if index < 0 else f"layer {index}": how for index, how in describe_recomputed(model).items()
        },
        "weights": [
            f"{weight.dtype} of shape {tuple(weight.shape)}{'' if weight.trainable else ', not trained'}"
            for weight in model.variables
        ],
    }


def _settings() -> dict[str, Any]:
    """Keras's settings, which affect how models are built and trained."""
    names = ("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch")
    return {**{name: getattr(keras.config, name)() for name in names}, "dtype_policy": keras.config.dtype_policy().name}


def _renumber_automatic_names(description: Any) -> Any:
    """Numbers automatic names in order of appearance: `dense_3` becomes `dense#0`.

    A worker that has made another model before counts from a higher number than others.
    """
    numbers: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for kind, name in _names_in(description):
        automatic = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
        if name not in numbers and re.fullmatch(rf"{re.escape(automatic)}(_\d+)?", name):
            numbers[name] = f"{automatic}#{counts[automatic]}"
            counts[automatic] += 1
    return _renamed(description, numbers)


def _names_in(value: Any) -> Iterator[tuple[str, str]]:
    """Each object's class and name."""
    if isinstance(value, dict):
        config = value.get("config")
        if isinstance(config, dict) and isinstance(config.get("name"), str):
            yield str(value.get("class_name")), config["name"]
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names_in(item)


def _renamed(value: Any, names: Mapping[str, str], refers: bool = False) -> Any:
    """A description with other names where it has names of layers; `refers` says that `value` is in such a place."""
    if isinstance(value, list):
        return [_renamed(item, names, refers) for item in value]
    if isinstance(value, dict):
        return {key: _renamed(item, names, refers or key in _REFERENCES) for key, item in value.items()}
    return names.get(value, value) if refers and isinstance(value, str) else value
