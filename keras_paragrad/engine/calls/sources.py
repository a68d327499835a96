"""Reads off the graph which tensors the running `tape.gradient` needs, and which lookups depend on rows.

A tape asks a custom gradient for the gradients of all its inputs. In a GAN's step, that would compute the gradients of
both networks for each update. So the sources of `tape.gradient` are kept while it runs, and a divided call computes
only gradients of tensors that depend on a source.
"""

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.operations import SAME_BUFFER
from keras_paragrad.storage.lookups import Lookup, lookups_of
from keras_paragrad.storage.row_gradients import Lookups, can_split

# Operations that pass each input on as the output of the same index.
_IDENTITIES = SAME_BUFFER | {"IdentityN"}


class _Running(threading.local):
    """This thread's innermost `tape.gradient`: the keys of its sources, and which tensors depend on one of them."""

    def __init__(self) -> None:
        self.keys: frozenset[Any] | None = None
        self.known: dict[Any, bool] = {}


_RUNNING = _Running()


@contextlib.contextmanager
def differentiating(sources: Any) -> Generator[None]:
    """Context of `tape.gradient` with these sources, nested."""
    before = _RUNNING.keys, _RUNNING.known
    _RUNNING.keys, _RUNNING.known = frozenset(_keys(sources)), {}
    try:
        yield
    finally:
        _RUNNING.keys, _RUNNING.known = before


def _keys(sources: Any) -> Iterator[Any]:
    """The keys of sources. A variable has one for each of its handles, of which a distributed one has several."""
    for source in tf.nest.flatten(sources):
        value: Any = source.value if isinstance(source, keras.Variable) else source
        parts = [*getattr(value, "values", ()), *getattr(getattr(value, "copies", None), "values", ())]
        for part in parts if isinstance(value, tf.distribute.DistributedValues) else [value]:
            if isinstance(part, tf.Variable):
                yield id(part.handle)
                graph: Any = tf.compat.v1.get_default_graph()
                if not tf.executing_eagerly() and hasattr(graph, "capture"):
                    yield _key(graph.capture(part.handle))
            elif tf.is_tensor(part):
                yield _key(part)


def _key(tensor: Any) -> Any:
    """Identifies a tensor. In a graph, several objects may stand for one tensor, so its name does."""
    return (id(tensor.graph), tensor.name) if hasattr(tensor, "graph") and tf.is_symbolic_tensor(tensor) else id(tensor)


def is_needed(tensor: tf.Tensor) -> bool:
    """Whether a tensor depends on a source of the running `tape.gradient`. True where that isn't known."""
    keys, known = _RUNNING.keys, _RUNNING.known
    if keys is None or not tf.is_symbolic_tensor(tensor):
        return True
    pending = [tensor]
    while pending:
        current = pending[-1]
        key = _key(current)
        if key in known:
            pending.pop()
            continue
        inputs = [] if key in keys else _inputs(current)
        # A tensor is known once its inputs are. This ends, since graphs of TensorFlow's functions have no cycles.
        unknown = [each for each in inputs if _key(each) not in known]
        if unknown:
            pending += unknown
            continue
        known[key] = key in keys or any(known[_key(each)] for each in inputs)
        pending.pop()
    return known[_key(tensor)]


def _inputs(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    operation = tensor.op
    if operation.type in _IDENTITIES and tensor.value_index < len(operation.inputs):
        return [operation.inputs[tensor.value_index]]
    return list(operation.inputs)


def is_zero(cotangent: Any) -> bool:
    """Whether a tape has made a cotangent as zeros, for an output that isn't used."""
    if cotangent is None:
        return True
    if not isinstance(cotangent, tf.Tensor) or not tf.is_symbolic_tensor(cotangent):
        return False
    operation = cotangent.op
    while operation.type in SAME_BUFFER:
        operation = operation.inputs[0].op
    if operation.type == "ZerosLike":
        return True
    value = tf.get_static_value(operation.inputs[1] if operation.type == "Fill" else operation.outputs[0])
    return value is not None and not value.any()


def split_lookups(gradient: Any, rows: Sequence[Any], shape: Sequence[int]) -> Lookups | None:
    """Splits a table's gradient into lookups that depend on rows, and others. `None` for other gradients.

    Eager tensors don't show what they depend on, so there all lookups count as dependent on rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    lookups = lookups_of(gradient.indices)
    if not can_split(lookups):
        return None
    keys = {_key(part) for row in rows for part in tf.nest.flatten(row, expand_composites=True)}
    return Lookups.split(gradient, tuple(not _depends(lookup, keys) for lookup in lookups), shape)


def _depends(lookup: Lookup, keys: set[Any]) -> bool:
    known = lookup.recorded
    return any(_key(place.tensor) in keys for place in lookup.sources()) if known is None else known
