"""Turns any value into flat text that two workers can compare and a person can read."""

import functools
import inspect
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.alike.code import digest_of_class, digest_of_code, is_of_a_library, marshalled_code
from keras_paragrad.engine.losses.terms import bound_arguments

# What does not shape the computation: paths, verbosity, and ids of objects. Seeds may differ: initial values are the
# first worker's, and dropout draws different numbers on each replica anyway.
_LEFT_OUT = {
    *("verbose", "filepath", "filename", "log_dir", "directory", "path", "root", "shared_object_id"),
    *("seed", "registered_name", "module"),
}
# Attributes that Keras gives models and callbacks, some with automatic names in them.
_OF_KERAS = ("model", "params", "input_names", "output_names", "optimizer", "history")
_DEEPEST = 12
_MOST_ITEMS = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

Entries = Iterator[tuple[str, str]]


def entries_of(path: str, value: Any, depth: int = 0) -> Entries:
    """The leaves of a value: pairs of a path, such as `optimizer.learning_rate`, and a short text.

    Keras objects are represented by their config, functions by a checksum of their code and the values they capture,
    arrays by a checksum, and other objects by their class and their public attributes of plain types.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        yield path, _plain(value)
    elif isinstance(value, (np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        yield path, _array(value)
    elif isinstance(value, (tf.DType, np.dtype, tf.TensorShape)):
        yield path, str(value)
    elif isinstance(value, os.PathLike):
        yield path, "a path"
    elif depth >= _DEEPEST:
        yield path, type(value).__name__
    elif isinstance(value, Mapping):
        for key in value:
            if key not in _LEFT_OUT:
                yield from entries_of(f"{path}.{key}" if path else str(key), value[key], depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from _items(path, value, depth)
    elif isinstance(value, functools.partial):
        yield from entries_of(path, value.func, depth + 1)
        yield from entries_of(path, {"args": value.args, **value.keywords}, depth)
    elif isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, np.ufunc, type)):
        yield from _callable(path, value, depth)
    else:
        yield from _object(path, value, depth)


def config_of(value: Any) -> dict[str, Any] | None:
    """An object's Keras config; `None` if it has none, or getting it fails."""
    get_config = getattr(value, "get_config", None)
    if get_config is None:
        return None
    with warnings.catch_warnings():
        # Keras warns of functions without a name, of which the code is compared.
        warnings.simplefilter("ignore")
        try:
            config = get_config()
        except Exception:  # noqa: BLE001 - a user's own code, and its attributes say as much
            return None
    return config if isinstance(config, dict) else None


def attributes_of(value: Any) -> dict[str, Any]:
    """The public attributes of plain types that an object has beyond those of its Keras base class.

    Methods that a component of ours has replaced on a model are partials, and left out.
    """
    base = next((base for base in (keras.Model, keras.layers.Layer) if isinstance(value, base)), None)
    known = _attributes_of_a_plain(base) if base else frozenset[str]()
    return {
        name: each
        for name, each in sorted(getattr(value, "__dict__", {}).items())
        if not name.startswith("_")
        and name not in known
        and name not in _OF_KERAS
        and _compares(each)
        and not (isinstance(each, functools.partial) and hasattr(type(value), name))
    }


def kind_of(value: Any) -> str:
    """The name of an object's class, with a checksum of its code unless it is a library's."""
    kind = type(value)
    return kind.__name__ if is_of_a_library(kind) else f"{kind.__name__} (code {digest_of_class(kind)})"


@functools.cache
def _attributes_of_a_plain(base: type) -> frozenset[str]:
    return frozenset(vars(base())) | {"name"}


def _compares(value: Any) -> bool:
    """Whether a value of an attribute is expected to be the same on all workers."""
    if isinstance(value, str):
        return os.sep not in value
    if isinstance(
        value, (*_PLAIN, np.generic, np.ndarray, np.ufunc, FunctionType, BuiltinFunctionType, functools.partial)
    ):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(_compares, value))
    if isinstance(value, dict):
        return all(map(_compares, value.values()))
    return isinstance(value, (keras.losses.Loss, keras.regularizers.Regularizer, keras.optimizers.Optimizer))


def _items(path: str, value: Any, depth: int) -> Entries:
    items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
    if items and all(isinstance(item, _PLAIN) for item in items) and not any(map(_varies, items)):
        checksum = zlib.crc32(repr(items).encode())
        yield path, repr(items) if len(items) <= _MOST_ITEMS else f"{len(items)} items, checksum {checksum:08x}"
    else:
        yield f"{path}.length", str(len(items))
        for number, item in enumerate(items):
            yield from entries_of(f"{path}[{number}]", item, depth + 1)


def _varies(value: Any) -> bool:
    """Whether a text is a path, or serialized code, which may contain one."""
    return isinstance(value, str) and (os.sep in value or marshalled_code(value) is not None)


def _plain(value: Any) -> str:
    code = marshalled_code(value) if isinstance(value, str) else None
    if code is not None:
        return f"a function (code {digest_of_code(code)})"
    if isinstance(value, str) and os.sep in value:
        return "a path"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... (checksum {zlib.crc32(text.encode()):08x})"


def _array(value: Any) -> str:
    if not isinstance(value, np.ndarray) and (isinstance(value, (tf.Variable, keras.Variable)) or not _is_eager(value)):
        # Variables are compared with the weights, and symbolic tensors have no value.
        return f"{value.dtype} of shape {tuple(value.shape)}"
    array = np.asarray(value)
    if array.size <= 4:
        return repr(array.tolist())
    return f"{array.dtype} of shape {array.shape}, checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"


def _is_eager(value: Any) -> bool:
    return hasattr(value, "numpy")


def _callable(path: str, value: Any, depth: int) -> Entries:
    function: Any = inspect.unwrap(getattr(value, "__func__", value))
    name = getattr(function, "__qualname__", function.__name__)
    if not isinstance(function, FunctionType) or is_of_a_library(function):
        own = isinstance(value, type) and not is_of_a_library(value)
        yield path, f"{name} (code {digest_of_class(value)})" if own else name
        return
    yield path, f"{name} (code {digest_of_code(function.__code__)})"
    bound = dict(zip(function.__code__.co_freevars, _contents(function), strict=True))
    bound["default"] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for key, inner in bound.items():
        if _compares(inner) and inner is not value and not (key == "default" and not inner):
            yield from entries_of(f"{path}.{key}", inner, depth + 4)


def _contents(function: FunctionType) -> list[Any]:
    def content(cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return None

    return [content(cell) for cell in function.__closure__ or ()]


def _object(path: str, value: Any, depth: int) -> Entries:
    yield path, kind_of(value)
    config = config_of(value)
    own = config is None or not is_of_a_library(type(value))
    attributes = attributes_of(value) if own else {}
    # Keras leaves these out of the config of some losses and metrics, such as Huber.
    attributes |= bound_arguments(value)
    for key, inner in {**attributes, **without_automatic_names(value, config or {})}.items():
        if key not in _LEFT_OUT:
            yield from entries_of(f"{path}.{key}", inner, depth + 1)


def without_automatic_names(value: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A config without Keras's automatic name, which depends on how many objects were created before."""
    automatic = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(value).__name__).lower()
    name = config.get("name")
    if isinstance(name, str) and re.fullmatch(rf"{re.escape(automatic)}(_\d+)?", name):
        return {key: each for key, each in config.items() if key != "name"}
    return config
