"""What the running `tape.gradient` needs, and which lookups depend on rows: what the graph says of its tensors.

A tape asks a custom gradient for the gradients of all its inputs. A loop would compute them all, in a GAN's step those
of both networks for each update. So `tape.gradient` says while it runs which sources it was given, and a divided call
computes what leads to them.
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
    """The keys of the sources of this thread's innermost `tape.gradient`, and which tensors lead to them."""

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
    """The keys of sources: of tensors, and of the handles of variables, of which a distributed one has several."""
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
    """Names a tensor: in a graph by its name, as the object may be another for the same tensor."""
    return (id(tensor.graph), tensor.name) if hasattr(tensor, "graph") and tf.is_symbolic_tensor(tensor) else id(tensor)


def is_needed(tensor: tf.Tensor) -> bool:
    """Whether a tensor was computed from a source of the running `tape.gradient`; true where that isn't known."""
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
        # A tensor is known once its inputs are. In a loop, which has none in TensorFlow's functions, it would not end.
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
    """Whether a cotangent is the zeros that a tape makes for an output without a gradient."""
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
    """Splits a table's gradient, by whether lookups depend on rows; returns `None` if it isn't of lookups.

    In eager mode, which shows no sources, all lookups are taken to depend on rows.
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
