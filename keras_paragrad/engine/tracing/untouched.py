"""Calls or traces a model for a check, and restores the model afterwards."""

import collections
import contextlib
import functools
import random
import sys
import sysconfig
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import WeightScope, state_of_thread
from keras_paragrad.compat.private import FuncGraph, get_stateless_scope
from keras_paragrad.compat.state import KEPT
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.tracing.gradient_functions import releasing

Result = TypeVar("Result")
_OF_KERAS = (keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.random.SeedGenerator)
# Attributes of these are not followed, as they belong to others, or the content isn't in Python attributes.
_LEFT_ALONE = (keras.optimizers.Optimizer, keras.Variable, keras.KerasTensor, tf.Tensor, tf.Variable, type)
_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
_LIBRARIES = {"keras", "keras_paragrad", "numpy", "tensorflow", *sys.stdlib_module_names}
_ATOMS = (bool, bytes, complex, float, int, str, type(None))


def _wrapper_of_lists() -> type:
    """TensorFlow's class for lists that are attributes, such as some of a Functional model's."""
    module: Any = tf.Module()
    module.attribute = []
    return type(module.attribute)


# The classes of containers, and the methods that refill them. Keras's containers refuse changes once a layer is built,
# and TensorFlow's list wrapper doesn't read its own base list.
_CONTAINERS: tuple[tuple[type, str], ...] = (
    (_wrapper_of_lists(), "extend"),
    *((collections.OrderedDict, "update"), (dict, "update"), (set, "update")),
    *((list, "extend"), (collections.deque, "extend")),
)
# Arrays of more bytes aren't restored.
_SMALL_ARRAY = 2**20


@contextlib.contextmanager
def untouched(
    model: object, assignments: contextlib.AbstractContextManager[object], *, but: tuple[object, ...] = ()
) -> Generator[Any]:
    """Context that undoes the side effects of calling a model.

    Restores the Python attributes of the model and of its parts at any depth, the random generators of Python and
    NumPy, and Keras's thread-local state. Effects outside of Python remain, such as files that a layer writes. So do
    effects on objects of installed libraries other than Keras, such as loggers, which other threads may change.

    Args:
        model: A layer or model.
        assignments: A context that intercepts assignments to variables, such as a `keras.StatelessScope`.
        but: Objects to leave as the call leaves them.

    Returns:
        The value that `assignments` yields.
    """
    # The values of `KEPT`, which note what was logged, aren't restored.
    restorers = [
        *_restorers([model], (*but, *(slot.of(model) for slot in KEPT))),
        *_restorers([state_of_thread()], but),
    ]
    generators = random.getstate(), np.random.get_state()
    try:
        with assignments as scope:
            yield scope
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        values = [(slot, slot.of(model)) for slot in KEPT]
        for restore in restorers:
            restore()
        for slot, value in values:
            if slot.of(model) is not value:
                slot.attach(model, value)


def never_run() -> contextlib.AbstractContextManager[None]:
    """The `assignments` of a call that is traced into a graph that never runs."""
    return contextlib.nullcontext()


def trace_untouched(model: object, function: Callable[..., Any], *specs: Any) -> Any:
    """Traces a function that calls a model into a graph that never runs. Undoes side effects."""
    with untouched(model, never_run()):
        return tf.function(releasing(function), autograph=False).get_concrete_function(*specs)


def trace_rows(model: object, function: Callable[[Any], Result], data: Batch, rows: int | None) -> Result:
    """Traces a function for a batch of `rows` rows into a graph that never runs. Undoes side effects."""

    def placeholder(tensor: Any) -> tf.Tensor | None:
        return None if tensor is None else tf.compat.v1.placeholder(tensor.dtype, [rows, *tensor.shape[1:]])

    with FuncGraph("never_run").as_default(), untouched(model, WeightScope(collect_losses=True)):
        return function(tf.nest.map_structure(placeholder, data))


def without_assignments() -> contextlib.AbstractContextManager[object]:
    """The `assignments` of a call that is made only for its results."""
    # An open scope already keeps assignments from the variables.
    return keras.StatelessScope() if get_stateless_scope() is None else contextlib.nullcontext()


def _restorers(pending: list[Any], but: tuple[object, ...]) -> list[Callable[[], None]]:
    """Functions that restore the content of all objects reachable from `pending`."""
    seen: dict[int, object] = {id(value): value for value in but}
    restorers: list[Callable[[], None]] = []
    while pending:
        # TensorFlow's dictionary is a proxy.
        value = pending.pop()
        value = getattr(value, "__wrapped__", value) if isinstance(value, dict) else value
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (tuple, frozenset)):
            # Not `value` itself, to which TensorFlow's proxy of a named tuple would add.
            pending += [*value]
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _SMALL_ARRAY and value.flags.writeable:
                restorers.append(functools.partial(_fill_array, value, value.copy()))
        elif methods := next((pair for pair in _CONTAINERS if isinstance(value, pair[0])), None):
            content = dict(value) if isinstance(value, dict) else list(value)
            restorers.append(functools.partial(_fill, value, *methods, content))
            pending += [*content, *content.values()] if isinstance(content, dict) else content
        elif _is_followed(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            pending.append(vars(value))
    return restorers


def _is_followed(kind: type) -> bool:
    """Whether attributes of a class's instances are restored: only of Keras's classes and the user's."""
    if issubclass(kind, _LEFT_ALONE):
        return False
    return issubclass(kind, _OF_KERAS) or not _is_library(kind.__module__.partition(".")[0])


@functools.cache
def _is_library(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None)
    return package in _LIBRARIES or (path is not None and any(map(Path(path).is_relative_to, _INSTALLED)))


def _fill(container: Any, kind: type, add: str, content: Any) -> None:
    """Restores a container by methods of the class `kind`, unless it still has the same objects."""
    if _members(container) != _members(content):
        kind.clear(container)
        getattr(kind, add)(container, content)


def _members(container: Any) -> list[int]:
    return [id(item) for item in (*container, *(container.values() if isinstance(container, dict) else ()))]


def _fill_array(array: np.ndarray, content: np.ndarray) -> None:
    if array.tobytes() != content.tobytes():
        array[...] = content
