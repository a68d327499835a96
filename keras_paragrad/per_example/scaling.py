"""What a loss's gradient was divided by on its way to the layer, so as to undo it."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.layers import outermost_layer
from keras_paragrad._keras.losses import LossTerm, recorded_terms
from keras_paragrad._keras.replicas import replica_count
from keras_paragrad.per_example.losses import check_term


class Divisor:
    """Watches the model that is being trained compute its loss, from the call of a layer to its backward pass."""

    def __init__(self) -> None:
        outermost: Any = outermost_layer()
        self.model = outermost if isinstance(outermost, keras.Model) and outermost.compiled else None
        self._recording = contextlib.ExitStack()
        self.terms: list[LossTerm] = []
        if self.model is not None:
            self.terms = self._recording.enter_context(recorded_terms(self.model))

    def close(self) -> None:
        """Stops watching."""
        self._recording.close()

    def factor(self, batch: tf.Tensor) -> tf.Tensor:
        """What turns a share of the batch's gradient into the gradient of an example's own loss; a float32 scalar.

        Args:
            batch: How many examples there are on this replica, a float32 scalar.

        Raises:
            ValueError: The losses of the model's outputs were not divided by the same.
        """
        for term in self.terms:
            check_term(term)
        divisors = {term.loss.reduction: _divisor(term, batch) for term in self.terms} or {"mean": batch}
        if len(divisors) > 1:
            raise ValueError(
                f"The outputs' losses are reduced in different ways ({', '.join(map(str, divisors))}), so that there is "
                "no one factor between the gradient and those of the examples. Give them one reduction."
            )
        (reduction, divisor), = divisors.items()
        # Keras divides by the number of replicas, unless the loss is a sum.
        replicas = 1 if reduction in _SUMS else replica_count()
        return divisor * replicas / self._loss_scale()

    def _loss_scale(self) -> tf.Tensor:
        optimizer = getattr(self.model, "optimizer", None)
        return tf.constant(1.0) if optimizer is None else tf.cast(optimizer.scale_loss(tf.constant(1.0)), "float32")


_SUMS = ("sum", "none", None)


def _divisor(term: LossTerm, batch: tf.Tensor) -> tf.Tensor:
    if term.loss.reduction in _SUMS:
        return tf.constant(1.0)
    if term.loss.reduction == "mean_with_sample_weight" and term.weights is not None:
        return batch * tf.reduce_mean(tf.cast(term.weights, "float32"))
    return batch
