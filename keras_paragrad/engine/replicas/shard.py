"""Empty shards: replicas that get no examples, as the last ones do of a batch with fewer examples than replicas."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count


def rows_of(x: Any) -> tf.Tensor:
    """How many examples a batch of inputs holds."""
    return _sizes(next(tensor for tensor in keras.tree.flatten(x) if tensor is not None))[0]


class Shard(NamedTuple):
    """A replica's shard of a batch: how many examples it has, and whether it has any.

    Attributes:
        rows: How many.
        nonempty: Whether there are any, or `None` where the shapes say that there are.
    """

    rows: tf.Tensor
    nonempty: tf.Tensor | None = None

    @classmethod
    def of(cls, data: Any) -> "Shard":
        """That of a batch, as a step takes it."""
        tensors = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        rows = rows_of(tensors)
        certain = replica_count() == 1 or all(tensor.shape[0] for tensor in tensors)
        return cls(rows) if certain else cls(rows, rows > 0)

    def only(self, present: tf.Tensor) -> "Shard":
        """That of some of its rows, given which, `(rows,)`."""
        count = tf.math.count_nonzero(present, dtype=tf.int32)
        return Shard(count, count > 0)

    def filled(self, data: Any) -> Any:
        """The batch, with an example of zeros in it if there is none: not every layer can do without."""
        return data if self.nonempty is None else tf.cond(self.nonempty, lambda: data, lambda: _one_of_zeros(data))

    def cut(self, outputs: Any) -> Any:
        """Outputs of the filled batch, without those of an example that isn't there."""
        if self.nonempty is None:
            return outputs
        return keras.tree.map_structure(lambda tensor: tensor[: self.rows], outputs)

    def run(self, action: Callable[[], Any]) -> None:
        """Runs `action` where there are examples."""
        if self.nonempty is None:
            action()
            return

        def run_it():
            action()
            return True

        tf.cond(self.nonempty, run_it, lambda: False)

    def weight(self, value: tf.Tensor) -> tf.Tensor:
        """The weight of an example, or 0 if the shard is empty."""
        return value if self.nonempty is None else value * tf.cast(self.nonempty, value.dtype)

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients, which are zeros where there are no examples, whatever zeros have brought about."""
        return list(gradients) if self.nonempty is None else [self._zero_if_empty(gradient) for gradient in gradients]

    def _zero_if_empty(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._zero_if_empty(gradient.values), gradient.indices, gradient.dense_shape)
        # A branch, as it copies nothing.
        return tf.cond(self.nonempty, lambda: gradient, lambda: tf.zeros_like(gradient))


def _sizes(tensor: Any) -> Any:
    return tf.cast(tensor.dense_shape, "int32") if isinstance(tensor, tf.SparseTensor) else tf.shape(tensor)


def _one_of_zeros(data: Any) -> Any:
    def one(tensor):
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            sizes = tf.concat([[1], tensor.dense_shape[1:]], 0)
            return tf.SparseTensor(tensor.indices[:0], tensor.values[:0], sizes)
        if isinstance(tensor, tf.RaggedTensor):
            return _one_ragged(tensor)
        return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)

    return keras.tree.map_structure(one, data)


def _one_ragged(tensor: tf.RaggedTensor) -> tf.RaggedTensor:
    """A row of zeros, of length 1 in each dimension that is ragged."""
    inner = tensor.flat_values.shape[1:]
    # Where there is no row, the values need not have the dimensions that they have elsewhere.
    sizes = inner if inner.is_fully_defined() else tf.shape(tensor.flat_values)[1:]
    one: Any = tf.zeros(tf.concat([[1], sizes], 0), tensor.dtype)
    ragged: Any = tf.RaggedTensor
    for splits in tensor.nested_row_splits:
        one = ragged.from_row_splits(one, tf.constant([0, 1], splits.dtype), validate=False)
    return one
