"""The divisors of compiled losses: what a sum over elements is divided by, such as their number."""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.engine.losses.terms import LossTerm

# Identifies what a divisor counts: a word, and the `id`s of the tensors that it is computed from.
DivisorKey = tuple[Any, ...]
SUM = ("sum",)
SIZE = ("size",)
# A weight that rounding removes beside any other.
_LEAST = 1e-25


class Normalizer(NamedTuple):
    """The divisor of a loss, and so the weight of its gradient in a sum.

    Attributes:
        value: The divisor d, a float32 scalar. The gradient of two micro-batches together is
            (d1 * g1 + d2 * g2) / (d1 + d2).
        summed: Whether the loss is a sum, so that gradients are summed.
        stated: The user's `weighting`, or `None` if it follows from the compiled losses.
    """

    value: tf.Tensor
    summed: bool = False
    stated: str | None = None

    @property
    def never_zero(self) -> "Normalizer":
        """The normalizer, with a tiny value in place of 0: regularizers count even if each part of an update has 0."""
        return self._replace(value=tf.where(self.value == 0, _LEAST, self.value))


class UnknownDivisorError(ValueError):
    """The divisor of a loss is unknown."""


def divisor_of(term: LossTerm) -> tuple[DivisorKey, tf.Tensor]:
    """A key and the divisor, a float32 scalar, of one loss; 1 for a sum.

    Keys are equal for two terms if their divisors are proportional: `SUM` for a loss that is not divided, and `SIZE`
    for one that is divided by a fixed multiple of the rows.

    Raises:
        UnknownDivisorError: The loss overrides `__call__`, or returns a scalar.
    """
    if term.reduces_itself:
        raise UnknownDivisorError(f"The loss {term.loss.name!r} overrides __call__, so its normalizer is unknown.")
    values = term.values
    # Even with reduction "sum": the one number may be a mean over the batch.
    if values.shape.rank == 0:
        raise UnknownDivisorError(
            f"The loss {term.loss.name!r} returns one number for the whole batch, so its normalizer is unknown. Let it "
            "return one value per example."
        )
    if term.is_sum:
        return SUM, tf.constant(1.0)
    size = tf.cast(tf.size(values), "float32")
    if term.loss.reduction == "mean_with_sample_weight" and term.weights is not None:
        weights = tf.reduce_sum(tf.cast(term.weights, "float32"))
        return ("weights", id(term.sample_weight), *map(id, term.masks)), weights
    if term.mask is not None:
        return ("mask", *map(id, term.masks)), size * tf.reduce_mean(tf.cast(term.mask, "float32"))
    # Rows of unknown size may have other sizes in another part, so the divisor is no fixed multiple of the rows.
    inner = values.shape[1:]
    return SIZE if inner.is_fully_defined() else ("size", id(values)), size


def gradient_divisor_of(term: LossTerm) -> tuple[DivisorKey, tf.Tensor]:
    """The divisor of one loss's gradient, as in `divisor_of`.

    It differs from the loss's divisor for a mean of the examples' masked means: it is the number of examples.
    """
    kind, divisor = divisor_of(term)
    if not term.by_example or kind == SUM:
        return kind, divisor
    return SIZE, tf.cast(tf.shape(term.values)[0], "float32")
