"""The one way to call a model in a check, a probe, a trial or an estimate: afterwards it is as it was."""

import collections
import contextlib
import functools
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.global_state import GLOBAL_STATE_TRACKER
from keras.src.backend.common.stateless_scope import in_stateless_scope

_OF_KERAS = (keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.random.SeedGenerator)
# What they hold is not theirs to change, or in no Python attribute.
_LEFT_ALONE = (keras.optimizers.Optimizer, keras.Variable, keras.KerasTensor, tf.Tensor, tf.Variable, type)
_INSTALLED = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
_LIBRARIES = {"keras", "keras_paragrad", "numpy", "tensorflow", *sys.stdlib_module_names}
_ATOMS = (bool, bytes, complex, float, int, str, type(None))
# How containers are emptied and filled; bypassing Keras's, which refuse what a built layer gets.
_CONTAINERS: list[tuple[Any, str]] = [(collections.OrderedDict, "update"), (dict, "update"), (list, "extend")]
_CONTAINERS += [(set, "update"), (collections.deque, "extend")]
# Bytes of an array up to which its content is kept.
_SMALL = 2**20


@contextlib.contextmanager
def untouched(
    model: Any, assignments: contextlib.AbstractContextManager[Any], *, but: tuple[Any, ...] = ()
) -> Iterator[Any]:
    """Context in which a model may be called, and after which it is as if it had not been.

    What the model and all that it is made of have as Python attributes, at any depth, is put back, and so are the
    random generators of Python and NumPy and what Keras keeps for this thread. What Python can't take back, such as a
    file that a layer writes, stays; and so do the objects of installed libraries that are none of Keras's, such as a
    logger's, which their own threads may change meanwhile.

    Args:
        model: A layer or model.
        assignments: The context that keeps what is assigned from its variables, such as a `keras.StatelessScope`.
        but: Parts that keep what they become.

    Returns:
        What that context gives.
    """
    put_back = [*_kept([model], but), *_kept([vars(GLOBAL_STATE_TRACKER)], but)]
    generators = random.getstate(), np.random.get_state()
    try:
        with assignments as given:
            yield given
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        for each in put_back:
            each()


def never_run() -> contextlib.AbstractContextManager[None]:
    """The `assignments` of a call that is traced only, in a graph that is never run."""
    return contextlib.nullcontext()


def without_assignments() -> contextlib.AbstractContextManager[Any]:
    """The `assignments` of a call of which only the results count."""
    # Another scope that is open keeps them already.
    return contextlib.nullcontext() if in_stateless_scope() else keras.StatelessScope()


def _kept(pending: list[Any], but: tuple[Any, ...]) -> list[Callable[[], None]]:
    """What puts back each object that can be reached from some, if it has changed by then."""
    seen: dict[int, Any] = {id(each): each for each in but}
    put_back: list[Callable[[], None]] = []
    while pending:
        each = pending.pop()
        if isinstance(each, _ATOMS) or id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, (tuple, frozenset)):
            pending += each
        elif isinstance(each, np.ndarray):
            if each.nbytes <= _SMALL and each.flags.writeable:
                put_back.append(functools.partial(_fill_array, each, each.copy()))
        elif found := next((pair for pair in _CONTAINERS if isinstance(each, pair[0])), None):
            put_back.append(functools.partial(_fill, each, *found, content := _copied(each)))
            pending += [*content, *content.values()] if isinstance(content, dict) else content
        elif _is_followed(type(each)) and isinstance(getattr(each, "__dict__", None), dict):
            pending.append(vars(each))
    return put_back


def _is_followed(kind: type) -> bool:
    if issubclass(kind, _LEFT_ALONE):
        return False
    return issubclass(kind, _OF_KERAS) or not _is_library(kind.__module__.partition(".")[0])


@functools.cache
def _is_library(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None)
    return package in _LIBRARIES or (path is not None and any(map(Path(path).is_relative_to, _INSTALLED)))


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _fill(container: Any, kind: Any, add: str, content: Any) -> None:
    if _members(container) != _members(content):
        kind.clear(container)
        getattr(kind, add)(container, content)


def _members(container: Any) -> list[int]:
    return [id(each) for each in (*container, *(container.values() if isinstance(container, dict) else ()))]


def _fill_array(array: np.ndarray, content: np.ndarray) -> None:
    if array.tobytes() != content.tobytes():
        array[...] = content
