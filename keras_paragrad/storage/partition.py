"""How a variable is cut into shards of equal size, one for each replica."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# Bytes of a variable from which it is cut into shards: below, a gather costs more than it saves.
MIN_SHARD_BYTES = 2**14
# Rows of a matrix for each replica from which it is cut between rows; padding then costs at most one row in so many.
ROWS = 16


class Partition(NamedTuple):
    """How a variable's elements are divided: flat shards of one size, the last ones padded with zeros.

    Attributes:
        shape: The variable's shape.
        shards: How many shards there are, one for each replica of all workers.
        size: How many elements a shard has.
    """

    shape: tuple[int, ...]
    shards: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[Any], shards: int) -> "Partition":
        """That of a variable: a matrix with many rows between rows, so that a row is found in one shard."""
        sizes = tuple(int(size) for size in shape)
        elements = math.prod(sizes)
        if len(sizes) == 2 and sizes[0] >= ROWS * shards:
            return cls(sizes, shards, math.ceil(sizes[0] / shards) * sizes[1])
        return cls(sizes, shards, math.ceil(elements / shards))

    @property
    def elements(self) -> int:
        """How many elements the variable has."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int | None:
        """How many rows a shard has, or `None` if the variable isn't cut between rows."""
        if len(self.shape) == 2 and self.size % self.shape[1] == 0:
            return self.size // self.shape[1]
        return None

    def shard(self, whole: Any, index: int) -> tf.Tensor:
        """A shard of a tensor of the variable's shape."""
        flat = tf.reshape(whole, [-1])
        begin, end = (min(place * self.size, self.elements) for place in (index, index + 1))
        missing = self.size - (end - begin)
        return tf.pad(flat[begin:end], [[0, missing]]) if missing else flat[begin:end]

    def every_shard(self, whole: Any) -> list[tf.Tensor]:
        """All shards of a tensor of the variable's shape, by few operations."""
        flat, missing = tf.reshape(whole, [-1]), self.size * self.shards - self.elements
        return tf.split(tf.pad(flat, [[0, missing]]) if missing else flat, self.shards)

    def kept_shard(self, whole: Any, index: int) -> tf.Tensor:
        """A shard to assign to a variable, in memory of its own: a slice would keep the whole tensor in memory."""
        return tf.raw_ops.DeepCopy(x=self.shard(whole, index))

    def joined(self, shards: Sequence[Any]) -> tf.Tensor:
        """The tensor whose shards these are."""
        return self.whole(tf.concat(shards, 0))

    def whole(self, padded: tf.Tensor) -> tf.Tensor:
        """The tensor whose shards follow one another in `padded`."""
        filled = padded[: self.elements] if self.size * self.shards > self.elements else padded
        return tf.reshape(filled, self.shape)
