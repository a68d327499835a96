"""Adaptive clipping: a clip norm that follows a quantile of the examples' norms, privately."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_number
from keras_paragrad.compat.collectives import sum_over_replicas


@keras.saving.register_keras_serializable(package="keras_paragrad")
class AdaptiveClip:
    """A clip norm that follows a quantile of the norms of examples' gradients.

    After each update the norm C becomes C * exp(-learning_rate * (b - quantile)), where b is the share of the drawn
    examples whose norms are within C, with Gaussian noise. What that release takes of the budget is made up for by more
    noise on the gradients, so `epsilon` is that of a fixed clip norm.

    Args:
        quantile: The share of examples that is not to be clipped, between 0 and 1.
        initial: The norm of the first update.
        learning_rate: How fast it changes.
        count_noise: The standard deviation of the noise on the number of examples within the norm; by default a
            twentieth of the expected batch size.

    Raises:
        ValueError: An argument is out of range.

    Example:

    >>> from keras_paragrad.privacy import AdaptiveClip
    >>> AdaptiveClip(quantile=0.5, initial=0.1).initial
    0.1

    Reference:
        Andrew et al., Differentially private learning with adaptive clipping (2021),
        https://arxiv.org/abs/1905.03871.
    """

    def __init__(
        self,
        quantile: float = 0.5,
        initial: float = 0.1,
        learning_rate: float = 0.2,
        count_noise: float | None = None,
    ):
        self.quantile = float(check_number("quantile", quantile, above=0, below=1, example=0.5))
        self.initial = float(check_number("initial", initial, above=0, example=0.1))
        self.learning_rate = float(check_number("learning_rate", learning_rate, above=0, example=0.2))
        self.count_noise = check_number("count_noise", count_noise, above=0, example=10.0, optional=True)

    def __repr__(self) -> str:
        return f"AdaptiveClip({', '.join(f'{name}={value!r}' for name, value in self.get_config().items())})"

    def noise_on_count(self, expected_batch_size: int) -> float:
        """The standard deviation of the noise on the number of examples within the norm."""
        return expected_batch_size / 20 if self.count_noise is None else float(self.count_noise)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "quantile": self.quantile,
            "initial": self.initial,
            "learning_rate": self.learning_rate,
            "count_noise": self.count_noise,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdaptiveClip":
        return cls(**config)


class ClipState:
    """The norm that an `AdaptiveClip` has come to, and the count that changes it.

    Args:
        adaptive: How it changes.
        expected_batch_size: What the count is divided by.
        variable: The logarithm of the norm over `initial`: a float32 scalar that is saved with the model.
    """

    def __init__(self, adaptive: AdaptiveClip, expected_batch_size: int, variable: keras.Variable):
        self.adaptive, self.expected_batch_size, self._log = adaptive, expected_batch_size, variable
        # Of this replica. It has no noise yet, so it is in no file, and it is 0 between updates.
        self._within = tf.Variable(
            tf.constant(0.0),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @property
    def norm(self) -> tf.Tensor:
        """The norm, a float32 scalar."""
        return self.adaptive.initial * tf.exp(tf.convert_to_tensor(self._log.value))

    def count(self, norms: tf.Tensor, sample_weight: Any) -> None:
        """Counts the examples within the norm, on this replica; rows of weight 0 are none."""
        weights = tf.reshape(keras.tree.flatten(sample_weight)[0], [tf.shape(norms)[0], -1])[:, 0]
        # Less one half, so that an example more changes the sum by one half and not by one.
        votes = tf.cast(norms <= self.norm, "float32") - 0.5
        self._within.assign_add(tf.reduce_sum(tf.where(weights == 0, 0.0, votes)))

    def update(self, noise: tf.Tensor) -> None:
        """Changes the norm at the end of an update, on every replica.

        Args:
            noise: A draw of the standard normal distribution, the same on each.
        """
        (within,) = sum_over_replicas([tf.identity(self._within)])
        noisy = within + noise * self.adaptive.noise_on_count(self.expected_batch_size)
        share = noisy / self.expected_batch_size + 0.5
        self._log.assign_add(-self.adaptive.learning_rate * (share - self.adaptive.quantile))
        self._within.assign(0.0)
