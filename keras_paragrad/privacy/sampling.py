"""Poisson sampling: each example is in each update's batch with the same probability, independently."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import without_autotuning
from keras_paragrad.privacy.rows import Rows

# So many draws are made in one call of Python.
_AT_ONCE = 16
# The bits of a float32.
_MINUS_ZERO = -(2**31)


class Draw(NamedTuple):
    """The rows of an update's padded batch.

    Attributes:
        numbers: The numbers of the examples, int64 `(rows,)`; where there are none, an example that is there again.
        present: Which of them are of the draw, `(rows,)`: the first ones of each replica's rows.
    """

    numbers: np.ndarray
    present: np.ndarray


class PoissonSampling:
    """The batch of each update, drawn by a key and the update's number alone.

    Args:
        key: Two unsigned integers of 64 bits. Another one may take its place between epochs.
        examples: How many examples there are.
        rate: The probability of each to be in a batch.
        rows: Rows of the padded batch. Of a larger draw so many are kept, at random.
        replicas: Each has an equal share of the rows, of one draw for all; it divides them.
    """

    def __init__(self, key: tuple[int, int], examples: int, rate: float, rows: int, replicas: int = 1):
        self.key, self.examples, self.rate, self.rows = key, examples, rate, rows
        # As many of a draw for each replica, but for one: its place in the batch by its place in the draw.
        self._places = np.arange(rows).reshape(replicas, -1).T.ravel()

    def draw(self, update: int) -> Draw:
        """The batch of an update."""
        # Philox is a function of key and counter, so the draws of different updates are independent.
        random = np.random.Generator(np.random.Philox(key=self.key, counter=(0, 0, 0, update)))
        drawn = min(random.binomial(self.examples, self.rate), self.rows)
        chosen = np.sort(random.choice(self.examples, drawn, replace=False, shuffle=False))
        numbers = np.full(self.rows, chosen[0] if drawn else 0, np.int64)
        there = np.zeros(self.rows, bool)
        places = self._places[:drawn]
        numbers[places], there[places] = chosen, True
        return Draw(numbers, there)

    def several(self, updates: Iterable[int]) -> Draw:
        """The batches of updates, stacked."""
        return Draw(*map(np.stack, zip(*map(self.draw, updates), strict=True)))


def private_batches(rows: Rows, sampling: PoissonSampling, updates: Callable[[], Any]) -> tf.data.Dataset:
    """The padded batches `(x, y, sample_weight)` of updates.

    Args:
        rows: The examples.
        sampling: Draws the batch of each update.
        updates: Returns the numbers of the updates, for each iterator of the dataset.
    """

    def numbers(_: tf.Tensor) -> tf.Tensor:
        found = tf.numpy_function(lambda: np.asarray(updates(), np.int64), [], tf.int64)
        return tf.ensure_shape(found, [None])

    def draws(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Each call of Python by TensorFlow takes as long as some draws.
        found, there = tf.numpy_function(sampling.several, [numbers], [tf.int64, tf.bool])
        shape = [None, sampling.rows]
        return tf.ensure_shape(found, shape), tf.ensure_shape(there, shape)

    numbers, draws = map(tf.autograph.experimental.do_not_convert, (numbers, draws))
    # Not of a generator: TensorFlow fixes glibc's threshold for mapped memory at 128 KB in a process that reads one,
    # seen with Python 3.11. All larger buffers are then mapped and cleared anew each time they are allocated.
    epoch = tf.data.Dataset.from_tensors(0).map(numbers).unbatch()
    dataset = rows.taken(epoch.batch(_AT_ONCE).map(draws).unbatch())
    return without_autotuning(dataset.map(_weighed).prefetch(2))


@tf.autograph.experimental.do_not_convert
def _weighed(batch: Any, present: tf.Tensor) -> tuple[Any, Any, Any]:
    """A batch in which rows beyond the draw weigh minus zero: nothing, and yet not the zero of a user's own weight."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    if y is None:
        raise ValueError("There are no targets. Call fit(x, y), or pass data of (inputs, targets).")

    def weigh(targets: Any, weights: Any = None) -> tf.Tensor:
        weights = tf.ones_like(present, "float32") if weights is None else tf.convert_to_tensor(weights)
        weights = weights if weights.dtype.is_floating else tf.cast(weights, "float32")
        # Of the rank of the targets: one that is short of it, Keras would broadcast along other axes.
        missing = len(targets.shape) - len(weights.shape)
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * max(0, missing)], 0))
        beside = tf.reshape(present, [-1, *[1] * (len(weights.shape) - 1)])
        return tf.where(beside, weights, tf.constant(-0.0, weights.dtype))

    if keras.tree.is_nested(sample_weight):
        return x, y, keras.tree.map_structure(weigh, y, sample_weight)
    return x, y, keras.tree.map_structure(lambda targets: weigh(targets, sample_weight), y)


def present(batch: Any) -> tf.Tensor:
    """Fills the *present* stage: which rows of a padded batch are of the draw."""
    *_, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    weights = tf.convert_to_tensor(keras.tree.flatten(sample_weight)[0])
    weights = tf.cast(tf.reshape(weights, [tf.shape(weights)[0], -1])[:, 0], "float32")
    return tf.bitcast(weights, tf.int32) != _MINUS_ZERO
