"""What batches of each epoch looked like, so that workers can compare it when the epoch has ended."""

import zlib
from typing import Any

import tensorflow as tf

# Batches that are remembered: more than are ever prepared ahead.
_REMEMBERED = 4096
# An odd number, so that products keep all bits.
_FACTOR = 6364136223846793005


class Tally:
    """Records the shapes and dtypes of batches as they are read, before they are sharded.

    Batches are prepared ahead of the steps that take them, so for each of them is noted what all up to it have looked
    like; which was the last is asked afterwards.
    """

    def __init__(self):
        self._reading = 0
        self._notes: Any = None
        self._number: Any = None

    def begin(self) -> None:
        """Tells that another iterator has been made, which is the next to be read."""
        self._reading += 1
        if self._number is not None:
            self._number.assign(self._reading)

    @property
    def reading(self) -> int:
        """The number of the newest iterator."""
        return self._reading

    def recorded(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches, each of them recorded."""
        if self._notes is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._number = tf.Variable(tf.constant(self._reading, tf.int64), trainable=False)
                self._notes = tf.Variable(tf.zeros((_REMEMBERED, 3), tf.int64), trainable=False)
        layout = zlib.crc32(repr(batches.element_spec).encode())
        start = (tf.constant(0, tf.int64), tf.constant(layout, tf.int64))

        def note(state: Any, batch: Any) -> Any:
            index, total = state
            for size in _sizes(batch):
                total = (total ^ tf.cast(size, tf.int64)) * _FACTOR
            entry = tf.stack([self._number.read_value(), index, total])
            stored = tf.raw_ops.ResourceScatterUpdate(
                resource=self._notes.handle, indices=index % _REMEMBERED, updates=entry
            )
            with tf.control_dependencies([stored] if stored is not None else []):
                return (index + 1, tf.identity(total)), batch

        return batches.scan(start, note)

    def up_to(self, reading: int, batches: int) -> tuple[int, int]:
        """How many of an iterator's first batches there were, and a checksum of what they looked like.

        Args:
            reading: The iterator's number.
            batches: How many steps have taken one.
        """
        if self._notes is None or not batches:
            return 0, 0
        notes = self._notes.numpy()
        mine = notes[(notes[:, 0] == reading) & (notes[:, 1] < batches)]
        if not len(mine):
            return 0, 0
        last = mine[mine[:, 1].argmax()]
        return int(last[1]) + 1, int(last[2])


def _sizes(batch: Any) -> list[tf.Tensor]:
    """The sizes that a batch's shapes leave open, as scalars."""
    found = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.SparseTensor):
            found += [*tf.unstack(leaf.dense_shape, num=leaf.shape.rank), tf.shape(leaf.values)[0]]
        elif isinstance(leaf, tf.RaggedTensor):
            found += [leaf.nrows(), *(tf.shape(splits)[0] for splits in leaf.nested_row_splits[1:])]
            found += [tf.shape(leaf.flat_values)[0]]
        elif isinstance(leaf, tf.Tensor) and not leaf.shape.is_fully_defined():
            found += [tf.rank(leaf), tf.reduce_sum(_weighted(leaf))]
    return found


def _weighted(leaf: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(leaf, out_type=tf.int64)
    return shape * (tf.range(tf.size(shape, out_type=tf.int64)) * 2654435761 + 40503)
