"""The estimate of the gradient noise scale that is kept within the training step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad._keras.replicas.collectives import replica_count, sum_over_replicas
from keras_paragrad._keras.replicas.local import local_parts, replica_variable


class Noise(NamedTuple):
    """What gradients are made of.

    Attributes:
        signal: The squared norm of the gradient over all data.
        variance: The variance of a single example's gradient, summed over the weights.
    """

    signal: float
    variance: float

    @property
    def scale(self) -> float:
        """The noise scale: at so many examples a batch, noise and signal are equally large."""
        return self.variance / self.signal if self.signal > 0 else float("nan")


class NoiseEstimate:
    """Compares the norms of gradients of few examples with the norm of that of many.

    The squared norm of a gradient over B examples is on average |G|^2 + S / B. Two sizes give two equations, and each
    update's solution goes into a moving average, which is divided by the sum of its weights.

    Args:
        decay: What is left of the average at each update.
        is_summed: Whether the loss is a sum over the examples, and no mean; asked while the step is traced.
        examples: Instead of the gradients of micro-batches, those of single examples: the sum of their squared norms
            in this step on this replica.
    """

    def __init__(self, decay: float, is_summed: Callable[[], bool], examples: Callable[[], tf.Tensor] | None = None):
        self.decay, self.is_summed, self.examples = decay, is_summed, examples
        # Squared norms of the small gradients, the inverses of their sizes, their count; and the examples in them.
        self.window = replica_variable([4])
        # Signal and variance, and the sum of the weights in these averages.
        self.average = replica_variable([3])

    def gradient(self, gradients: Sequence[Any], rows: tf.Tensor) -> None:
        """Records the gradient of a replica's micro-batch; see `keras_paragrad._keras.telemetry.observe.Observe`."""
        rows = tf.cast(rows, "float32")
        if self.examples is not None:
            small = [self.examples(), rows, rows, rows]
        else:
            # Keras has divided a mean by the number of replicas, and not a sum by anything.
            factor = 1 / rows if self.is_summed() else tf.constant(float(replica_count()))
            small = [_squared_norm(gradients) * tf.square(factor), 1 / rows, tf.constant(1.0), rows]
        self.window.assign_add(tf.stack(small))

    def update(self, gradients: Sequence[Any]) -> None:
        """Takes note of the gradient of all of them, and solves."""
        (window,) = sum_over_replicas([tf.identity(self.window)])
        squares, inverses, count, rows = tf.unstack(window)
        large = _squared_norm(gradients) / (tf.square(rows) if self.is_summed() else 1.0)
        small, of_small, of_large = squares / count, inverses / count, 1 / rows
        difference = of_small - of_large
        signal = (of_small * large - of_large * small) / difference
        variance = (small - large) / difference
        averaged = self.decay * self.average + (1 - self.decay) * tf.stack([signal, variance, 1.0])
        # A window of one micro-batch has nothing to compare.
        self.average.assign(tf.where(difference > 1e-9, averaged, self.average))
        self.window.assign(tf.zeros([4]))

    def begin(self) -> None:
        """Forgets a window that was left open; called by the host."""
        for part in local_parts(self.window):
            part.assign(tf.zeros([4]))

    def read(self) -> Noise:
        """The average so far; called by the host."""
        signal, variance, weight = (float(number) for number in local_parts(self.average)[0].numpy())
        return Noise(signal / weight, variance / weight) if weight else Noise(float("nan"), float("nan"))


def _squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(gradient, "float32"))) for gradient in dense])
