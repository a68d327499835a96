"""The gradients of a table of which each example looked up a few rows, kept as those until they are read."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_paragrad.per_example.rows import Rows, Total


class LookedUp(NamedTuple):
    """Each example's gradient for a table, as the rows it looked up; one looked up twice is there twice.

    Attributes:
        indices: Which rows of the table, `(batch, lookups)`.
        values: Their gradients, `(batch, lookups, width)`.
        size: How many rows the table has.
    """

    indices: tf.Tensor
    values: tf.Tensor
    size: int

    def laid_out(self) -> tf.Tensor:
        """The gradients in the table's shape, `(batch, size, width)`."""
        batch, width = tf.shape(self.indices)[0], self.values.shape[-1]
        places = self.indices + tf.range(batch)[:, tf.newaxis] * self.size
        values = tf.reshape(self.values, [-1, width])
        rows = tf.math.unsorted_segment_sum(values, tf.reshape(places, [-1]), batch * self.size)
        return tf.reshape(rows, [-1, self.size, width])


class LookedUpRows:
    """The gradients of a table's rows after each step; used as `Rows` are, which would be mostly zeros.

    Args:
        shape: The table's.
        capacity: How many examples there is room for; then there is a place for every number of lookups, too.
        count: How many examples there are on each replica.
        factor: What to multiply gradients by when they are read, on each replica.
    """

    def __init__(self, shape: Sequence[int], capacity: int | None, count: Total, factor: Total):
        self.size, self.width = shape
        self.capacity, self.count, self.factor = capacity, count, factor
        # In a step compiled by XLA shapes are fixed, and each such step writes to a place of its own size.
        self.lookups = Total([], tf.int32)
        self.places: dict[int, tuple[Rows, Rows]] = {}
        if capacity is None:
            self.places[0] = self._place(None)

    def assign(self, gradients: LookedUp | tf.Tensor) -> None:
        """Leaves gradients, those looked up or those of all rows, `(count, *shape)`; within a step, on each replica."""
        indices, values = self._indices_and_values(gradients)
        lookups: Any = 0
        if self.capacity is not None:
            lookups = indices.shape[1]
            self.lookups.assign(lookups)
        if lookups not in self.places:
            self.places[lookups] = _outside_of_graphs(self._place, lookups)
        for rows, given in zip(self.places[lookups], (indices, values), strict=True):
            rows.assign(given)

    def numpy(self) -> np.ndarray:
        """The gradients in the table's shape, `(count, *shape)`, of this process's replicas.

        Raises:
            ValueError: There were more examples than the capacity.
        """
        place = self.places.get(int(self.lookups.of_replicas()[0]))
        if place is None:
            return np.zeros((0, self.size, self.width), np.float32)
        parts = zip(*(rows.of_replicas() for rows in place), strict=True)
        found = [LookedUp(tf.constant(indices), tf.constant(values), self.size) for indices, values in parts]
        return np.concatenate([looked_up.laid_out().numpy() for looked_up in found])

    def _place(self, lookups: int | None) -> tuple[Rows, Rows]:
        indices = Rows([lookups], self.capacity, self.count, dtype=tf.int32)
        return indices, Rows([lookups, self.width], self.capacity, self.count, self.factor)

    def _indices_and_values(self, gradients: LookedUp | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if isinstance(gradients, LookedUp):
            lookups = gradients.indices.shape[1]
            any_number = self.capacity is None and lookups is None
            if any_number or (lookups is not None and lookups <= self.size):
                return gradients.indices, gradients.values
            gradients = gradients.laid_out()
        every_row = tf.range(self.size)[tf.newaxis]
        return tf.repeat(every_row, tf.shape(gradients)[0], axis=0), gradients


def _outside_of_graphs(make: Callable[..., Any], *arguments: Any) -> Any:
    """What a function makes in a thread of its own; here, TensorFlow makes variables only in a graph's first trace."""
    strategy = tf.distribute.get_strategy()

    def made():
        with strategy.scope():
            return make(*arguments)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()
