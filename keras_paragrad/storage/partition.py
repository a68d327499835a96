"""How a variable is divided into shards of equal size, one for each replica."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# Bytes from which a variable is sharded: below, a gather costs more than the shards save.
MIN_SHARD_BYTES = 2**14
# Rows for each replica from which a matrix is divided between rows: padding is at most one row in this many.
ROWS = 16


class Partition(NamedTuple):
    """How a variable is divided: flat shards of one size, the last ones padded with zeros.

    Attributes:
        shape: The variable's shape.
        shards: The number of shards, one for each replica of all workers.
        size: The number of elements of a shard.
    """

    shape: tuple[int, ...]
    shards: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], shards: int) -> "Partition":
        """The partition of a variable: a matrix with many rows is divided between rows."""
        sizes = tuple(int(size) for size in shape)
        if len(sizes) == 2 and sizes[0] >= ROWS * shards:
            return cls(sizes, shards, math.ceil(sizes[0] / shards) * sizes[1])
        return cls(sizes, shards, math.ceil(math.prod(sizes) / shards))

    @property
    def elements(self) -> int:
        """The number of elements of the variable."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int | None:
        """The number of rows of a shard, or `None` if a row may be in two shards."""
        if len(self.shape) == 2 and self.size % self.shape[1] == 0:
            return self.size // self.shape[1]
        return None

    def shard(self, whole: tf.Tensor, index: int) -> tf.Tensor:
        """One shard of a tensor of the variable's shape."""
        flat = tf.reshape(whole, [-1])
        begin, end = (min(place * self.size, self.elements) for place in (index, index + 1))
        missing = self.size - (end - begin)
        return tf.pad(flat[begin:end], [[0, missing]]) if missing else flat[begin:end]

    def all_shards(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """All shards of a tensor of the variable's shape, with few operations."""
        flat, missing = tf.reshape(whole, [-1]), self.size * self.shards - self.elements
        return tf.split(tf.pad(flat, [[0, missing]]) if missing else flat, self.shards)

    def copy_shard(self, whole: tf.Tensor, index: int) -> tf.Tensor:
        """A copy of one shard, to assign: a slice would keep the whole tensor in memory."""
        return tf.raw_ops.DeepCopy(x=self.shard(whole, index))

    def whole(self, padded: tf.Tensor) -> tf.Tensor:
        """The tensor of the variable's shape whose shards are concatenated in `padded`."""
        flat = padded[: self.elements] if self.size * self.shards > self.elements else padded
        return tf.reshape(flat, self.shape)
