"""Factored gradients: per-example gradients stored as their factors, where these are smaller, until they are read."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.per_example.rows import ReplicaRows, Total


class Factors(NamedTuple):
    """Factored per-example gradients of one weight: rows of an embedding table, or the factors of a matrix product.

    Attributes:
        tensors: The factors, each `(batch, ...)`. The gradients are linear in the last one.
        layout: Computes the gradients, `(batch, *shape)`, from the factors. Layouts that compare equal are
            interchangeable.
    """

    tensors: Sequence[Any]
    layout: Callable[..., Any]

    def materialized(self) -> Any:
        """The gradients, `(batch, *shape)`."""
        return self.layout(*self.tensors)

    @classmethod
    def of(cls, gradients: Any) -> "Factors":
        """Returns `Factors` unchanged; wraps plain gradients as their only factor."""
        return gradients if isinstance(gradients, Factors) else cls([gradients], _whole)


class _Place(NamedTuple):
    """The variables that store factors of the same shapes and layout."""

    shapes: Sequence[tuple]
    layout: Callable[..., Any]
    rows: Sequence[ReplicaRows]


class FactoredGradients:
    """The per-example gradients of one weight, stored by each step for the host to read.

    Args:
        shape: The weight's shape.
        capacity: Most examples that can be stored on each replica; `None` for any number.
        count: How many examples are stored.
        factor: Multiplies the gradients when they are read.
    """

    def __init__(self, shape: Sequence[int], capacity: int | None, count: Total, factor: Total):
        self.shape, self.capacity, self.count, self.factor = shape, capacity, count, factor
        self.places: list[_Place] = []
        # Index of the place that the last step wrote to.
        self.number = Total([], tf.int32)

    def assign(self, gradients: Any) -> None:
        """Stores gradients, `(count, *shape)`, or their `Factors`; called within a step, on each replica."""
        parts = Factors.of(gradients)
        # Shapes in steps compiled by XLA are static, but may still be unknown while tracing.
        if self.capacity is not None and any(None in tensor.shape[1:] for tensor in parts.tensors):
            parts = Factors.of(parts.materialized())
        number = self._number_of(parts)
        self.number.assign(number)
        for rows, tensor in zip(self.places[number].rows, parts.tensors, strict=True):
            rows.assign(tensor)

    def numpy(self) -> np.ndarray:
        """The gradients, `(count, *shape)`, of this process's replicas.

        Raises:
            ValueError: There were more examples than the capacity.
        """
        if not self.places:
            return np.zeros((0, *self.shape), np.float32)
        numbers = [int(number) for number in self.number.of_replicas()]
        found = {number: [rows.of_replicas() for rows in self.places[number].rows] for number in set(numbers)}
        of_replicas = [
            Factors([rows[replica] for rows in found[number]], self.places[number].layout)
            for replica, number in enumerate(numbers)
        ]
        return np.concatenate([np.asarray(parts.materialized()) for parts in of_replicas])

    def _number_of(self, parts: Factors) -> int:
        # Each combination of shapes has a place of its own, unless shapes may vary.
        fixed = self.capacity is not None
        shapes = [(part.dtype, *(size if fixed else None for size in part.shape[1:])) for part in parts.tensors]
        for number, place in enumerate(self.places):
            if (place.shapes, place.layout) == (shapes, parts.layout):
                return number
        self.places.append(_outside_of_graphs(self._place, shapes, parts.layout))
        return len(self.places) - 1

    def _place(self, shapes: Sequence[tuple], layout: Callable[..., Any]) -> _Place:
        types = [tf.float32 if dtype.is_floating else dtype for dtype, *_ in shapes]
        factors = [None] * (len(shapes) - 1) + [self.factor]
        rows = [
            ReplicaRows(shape, self.capacity, self.count, factor, dtype)
            for (_, *shape), factor, dtype in zip(shapes, factors, types, strict=True)
        ]
        return _Place(shapes, layout, rows)


def _whole(gradients: Any) -> Any:
    return gradients


def _outside_of_graphs(make: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `make` in another thread, since a `tf.function` may create variables only in its first trace."""
    strategy = tf.distribute.get_strategy()

    def made():
        with strategy.scope():
            return make(*arguments)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()
