"""Adaptive clipping: the clip norm follows a quantile of the examples' gradient norms, privately."""

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_number
from keras_paragrad.compat.collectives import sum_over_replicas
from keras_paragrad.compat.types import Config, Structure


@keras.saving.register_keras_serializable(package="keras_paragrad")
class AdaptiveClip:
    """A clip norm that follows a quantile of the norms of examples' gradients.

    After each update the norm C becomes C * exp(-learning_rate * (b - quantile)), where b is the fraction of the
    sampled examples whose norms are within C, with Gaussian noise. More noise on the gradients pays for that release,
    so `epsilon` is the same as with a fixed clip norm.

    Args:
        quantile: The fraction of examples that are not clipped, between 0 and 1.
        initial: The clip norm of the first update.
        learning_rate: Step size of the clip norm, on a log scale.
        count_noise: Standard deviation of the noise on the number of examples within the norm; by default a twentieth
            of the expected batch size.

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

    def count_deviation(self, expected_batch_size: int) -> float:
        """Standard deviation of the noise on the number of examples within the norm."""
        return expected_batch_size / 20 if self.count_noise is None else float(self.count_noise)

    def get_config(self) -> Config:
        """The constructor's arguments."""
        return {
            "quantile": self.quantile,
            "initial": self.initial,
            "learning_rate": self.learning_rate,
            "count_noise": self.count_noise,
        }

    @classmethod
    def from_config(cls, config: Config) -> "AdaptiveClip":
        return cls(**config)


class ClipState:
    """The current norm of an `AdaptiveClip`, and the count that changes it.

    `variable` is log(norm / initial), a float32 scalar that is saved with the model.
    """

    def __init__(self, adaptive: AdaptiveClip, expected_batch_size: int, variable: keras.Variable):
        self.adaptive, self.expected_batch_size, self._log = adaptive, expected_batch_size, variable
        # This replica's examples within the norm, minus half of all examples that it counted; 0 between updates. It has
        # no noise yet, so it must never be saved.
        self._within = tf.Variable(
            tf.constant(0.0),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    @property
    def norm(self) -> tf.Tensor:
        """The clip norm, a float32 scalar."""
        return self.adaptive.initial * tf.exp(tf.convert_to_tensor(self._log.value))

    def count(self, norms: tf.Tensor, sample_weight: Structure) -> None:
        """Adds up this replica's votes: 1/2 for an example within the norm, -1/2 for another, none at weight 0.

        Args:
            norms: The norms of the examples' gradients, `(batch,)`.
            sample_weight: The sample weights of the first loss, `(batch, ...)`.
        """
        weights = tf.reshape(keras.tree.flatten(sample_weight)[0], [tf.shape(norms)[0], -1])[:, 0]
        # Centered on 0: adding an example changes the sum by at most 1/2 (sensitivity 1/2 instead of 1).
        votes = tf.cast(norms <= self.norm, "float32") - 0.5
        self._within.assign_add(tf.reduce_sum(tf.where(weights == 0, 0.0, votes)))

    def update(self, noise: tf.Tensor) -> None:
        """Changes the norm at the end of an update, by a standard normal draw that is the same on every replica."""
        (within,) = sum_over_replicas([tf.identity(self._within)])
        noisy = within + noise * self.adaptive.count_deviation(self.expected_batch_size)
        # Votes were centered on 0, and the fraction of examples within the norm is centered on 1/2.
        fraction = noisy / self.expected_batch_size + 0.5
        self._log.assign_add(-self.adaptive.learning_rate * (fraction - self.adaptive.quantile))
        self._within.assign(0.0)
