"""Random numbers by row, for trials: a part of a batch draws those that the whole draws for the same rows."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops_v2

_lock = threading.Lock()
_local = threading.local()
_contexts = 0
_originals: dict[tuple[Any, str], Callable[..., tf.Tensor]] = {}


def _normal(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return generator.normal(size=shape)


def _truncated(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return np.clip(generator.normal(size=shape), -2, 2)


def _uniform(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return generator.uniform(size=shape)


def _integers(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> Any:
    low, high = (tf.cast(arguments[name], "float64") for name in ("minval", "maxval"))
    return tf.floor(low + (high - low) * generator.uniform(size=shape))


# The operations that draw: their modules, names, and what draws in their place.
_DRAWS: list[tuple[Any, str, Callable[..., Any]]] = [
    (gen_random_ops, "random_standard_normal", _normal),
    (gen_random_ops, "truncated_normal", _truncated),
    (gen_random_ops, "random_uniform", _uniform),
    (gen_random_ops, "random_uniform_int", _integers),
    (gen_stateless_random_ops_v2, "stateless_random_normal_v2", _normal),
    (gen_stateless_random_ops_v2, "stateless_truncated_normal_v2", _truncated),
    (gen_stateless_random_ops_v2, "stateless_random_uniform_v2", _uniform),
    (gen_stateless_random_ops_v2, "stateless_random_uniform_int_v2", _integers),
]


class Rows:
    """The rows of a part, and how often random numbers were drawn for them."""

    def __init__(self, first: int, count: int, total: int):
        self.first, self.count, self.total, self.draws = first, count, total, 0

    def draw(self, make: Callable[..., Any], shape: Any, arguments: dict[str, Any]) -> Any:
        """Draws the numbers for the rows; of another number of rows, other numbers for each part."""
        sizes = tf.get_static_value(tf.convert_to_tensor(shape))
        if sizes is None:
            return None
        sizes = [int(size) for size in sizes]
        self.draws += 1
        if sizes and sizes[0] == self.count:
            generator = np.random.default_rng(self.draws)
            return make(generator, [self.total, *sizes[1:]], arguments)[self.first : self.first + self.count]
        fixed = bool(sizes) and sizes[0] > 1
        return make(np.random.default_rng([self.draws, self.first if fixed else 0]), sizes, arguments)


@contextlib.contextmanager
def random_numbers_by_row(first: int, count: int, total: int) -> Generator[Rows]:
    """Context in which, on this thread, tensors of `count` rows get the random numbers of rows from `first` on.

    TensorFlow's operations are replaced for the whole process, and draw as before on other threads.
    """
    _local.rows = rows = Rows(first, count, total)
    _count_contexts(1)
    try:
        yield rows
    finally:
        _count_contexts(-1)
        _local.rows = None


@contextlib.contextmanager
def random_numbers_of_part(first: int, count: int, total: int) -> Generator[None]:
    """Context, within `random_numbers_by_row`, of a part of other rows; what follows continues after the last part."""
    before: Rows = _local.rows
    _local.rows = Rows(first, count, total)
    _local.rows.draws = before.draws
    try:
        yield
    finally:
        if first + count == total:
            before.draws = _local.rows.draws
        _local.rows = before


def _count_contexts(change: int) -> None:
    global _contexts
    with _lock:
        if not _contexts:
            for module, name, make in _DRAWS:
                _originals[module, name] = original = getattr(module, name)
                setattr(module, name, _by_row(original, make))
        _contexts += change
        if not _contexts:
            for (module, name), original in _originals.items():
                setattr(module, name, original)


def _by_row(original: Callable[..., tf.Tensor], make: Callable[..., Any]) -> Callable[..., Any]:
    def draw(shape: Any, *arguments: Any, **keywords: Any) -> Any:
        rows: Rows | None = getattr(_local, "rows", None)
        # What they return gives the dtype.
        drawn = original(shape, *arguments, **keywords)
        named = {**dict(zip(("minval", "maxval"), arguments, strict=False)), **keywords}
        values = None if rows is None else rows.draw(make, shape, named)
        return drawn if values is None else tf.cast(values, drawn.dtype)

    return draw
