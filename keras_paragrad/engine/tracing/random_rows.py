"""Random numbers by row, for trials: a part of a batch draws the same numbers as the whole for the same rows."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.operations import gen_random_ops, gen_stateless_random_ops_v2
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement


def _normal(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return generator.normal(size=shape)


def _truncated(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return np.clip(generator.normal(size=shape), -2, 2)


def _uniform(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> np.ndarray:
    return generator.uniform(size=shape)


def _integers(generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> Any:
    low, high = (tf.cast(arguments[name], "float64") for name in ("minval", "maxval"))
    return tf.floor(low + (high - low) * generator.uniform(size=shape))


# The operations that draw: their modules, names and replacements.
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
    """The `count` rows from `first` on, of a batch of `total` rows; `draws` counts the random operations so far.

    `count` is `None` if the number of rows is unknown.
    """

    def __init__(self, first: int, count: int | None, total: int):
        self.first, self.count, self.total, self.draws = first, count, total, 0

    def draw(self, make: Callable[..., Any], shape: Any, arguments: dict[str, Any]) -> Any:
        """Draws the numbers of these rows; `None` if the shape isn't static.

        Tensors with another number of rows get other numbers in each part; scalars and single rows get the same ones.
        """
        if self.count is None:
            raise ValueError("random numbers are drawn for rows whose number isn't known while the graph is traced")
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


def _draw(
    make: Callable[..., Any], rows: Rows, original: Callable[..., tf.Tensor], shape: Any, *args: Any, **kwargs: Any
):
    """Replaces a random operation of TensorFlow: calls it, and takes the values of `rows` instead, if any."""
    # The original's result gives the dtype.
    drawn = original(shape, *args, **kwargs)
    values = rows.draw(make, shape, {**dict(zip(("minval", "maxval"), args, strict=False)), **kwargs})
    return drawn if values is None else tf.cast(values, drawn.dtype)


_PATCH = ProcessPatch[Rows](
    lambda: [Replacement(module, name, functools.partial(_draw, make)) for module, name, make in _DRAWS]
)


def random_numbers_by_row(first: int, count: int | None, total: int) -> contextlib.AbstractContextManager[Rows]:
    """Context in which, on this thread, tensors of `count` rows get the random numbers of rows from `first` on."""
    return _PATCH.open(Rows(first, count, total))


@contextlib.contextmanager
def random_numbers_of_part(first: int, count: int, total: int) -> Generator[None]:
    """Context, within `random_numbers_by_row`, of another part; later draws continue after the last part."""
    whole, part = cast(Rows, _PATCH.value), Rows(first, count, total)
    part.draws = whole.draws
    with _PATCH.open(part):
        yield
    if first + count == total:
        whole.draws = part.draws
