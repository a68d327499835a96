"""The gradient noise scale estimate that is updated within the training step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.local import local_parts, replica_variable


class Noise(NamedTuple):
    """The signal and the noise in gradients.

    Attributes:
        signal: The squared norm of the gradient over all data.
        variance: The variance of a per-example gradient, summed over the weights.
    """

    signal: float
    variance: float

    @property
    def scale(self) -> float:
        """The noise scale: the batch size at which noise and signal are equally large."""
        return self.variance / self.signal if self.signal > 0 else float("nan")


class NoiseEstimate:
    """Estimates signal and noise from the gradient norms of small and large batches.

    The expected squared norm of a gradient over B examples is |G|^2 + S / B. Two batch sizes give two equations. Each
    update's solution enters a moving average, which is normalized by the sum of its weights.

    Args:
        decay: Decay of the moving average per update.
        is_summed: Returns whether the loss is a sum over the examples rather than a mean; called while the step is
            traced.
        examples: Uses per-example gradients instead of those of micro-batches: returns the sum of their squared norms
            in this step on this replica.
    """

    def __init__(self, decay: float, is_summed: Callable[[], bool], examples: Callable[[], tf.Tensor] | None = None):
        self.decay, self.is_summed, self.examples = decay, is_summed, examples
        # Sums over the small gradients of squared norms, inverse sizes, count and number of examples.
        self.window = replica_variable([4])
        # Weighted sums of signal and variance, and the sum of the weights.
        self.average = replica_variable([3])

    def gradient(self, gradients: Sequence[Any], rows: tf.Tensor) -> None:
        """Records the gradient of one replica's micro-batch; see `keras_paragrad.engine.telemetry.observe.Observe`."""
        rows = tf.cast(rows, "float32")
        if self.examples is not None:
            small = [self.examples(), rows, rows, rows]
        else:
            # Keras has divided a mean by the number of replicas; a sum is not divided.
            factor = 1 / rows if self.is_summed() else tf.constant(float(replica_count()))
            small = [_squared_norm(gradients) * tf.square(factor), 1 / rows, tf.constant(1.0), rows]
        self.window.assign_add(tf.stack(small))

    def update(self, gradients: Sequence[Any]) -> None:
        """Records the gradient of the whole update and solves for signal and variance."""
        (window,) = sum_over_replicas([tf.identity(self.window)])
        squares, inverses, count, rows = tf.unstack(window)
        large = _squared_norm(gradients) / (tf.square(rows) if self.is_summed() else 1.0)
        small, of_small, of_large = squares / count, inverses / count, 1 / rows
        difference = of_small - of_large
        signal = (of_small * large - of_large * small) / difference
        variance = (small - large) / difference
        averaged = self.decay * self.average + (1 - self.decay) * tf.stack([signal, variance, 1.0])
        # A window of a single micro-batch has nothing to compare.
        self.average.assign(tf.where(difference > 1e-9, averaged, self.average))
        self.window.assign(tf.zeros([4]))

    def begin(self) -> None:
        """Discards an unfinished window; called by the host."""
        for part in local_parts(self.window):
            part.assign(tf.zeros([4]))

    def read(self) -> Noise:
        """Returns the average so far; called by the host."""
        signal, variance, weight = (float(number) for number in local_parts(self.average)[0].numpy())
        return Noise(signal / weight, variance / weight) if weight else Noise(float("nan"), float("nan"))


def _squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(gradient, "float32"))) for gradient in dense])
