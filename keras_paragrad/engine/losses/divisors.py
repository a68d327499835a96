"""The divisor of a compiled loss."""

import tensorflow as tf

from keras_paragrad.engine.losses.terms import LossTerm

SUM = ("sum",)
SIZE = ("size",)


class UnknownDivisorError(ValueError):
    """The divisor of a loss is unknown."""


def divisor_of(term: LossTerm) -> tuple[tuple, tf.Tensor]:
    """What one loss was divided by.

    Returns:
        A key that two terms share if their divisors are proportional, and the divisor, a float32 scalar. The key is
        `SUM` for a loss that is not divided, and `SIZE` for one that is divided by a fixed multiple of the rows.

    Raises:
        UnknownDivisorError: The loss reduces itself.
    """
    if term.reduces_itself:
        raise UnknownDivisorError(f"The loss {term.loss.name!r} overrides __call__, so its normalizer is unknown.")
    reduction = term.loss.reduction
    if term.is_sum:
        return SUM, tf.constant(1.0)
    values = term.values
    if values.shape.rank == 0:
        raise UnknownDivisorError(
            f"The loss {term.loss.name!r} returns one number for the whole batch, so its normalizer is unknown. Let it "
            "return one value per example."
        )
    size = tf.cast(tf.size(values), "float32")
    if reduction == "mean_with_sample_weight" and term.weights is not None:
        weights = tf.reduce_sum(tf.cast(term.weights, "float32"))
        return ("weights", id(term.sample_weight), *map(id, term.masks)), weights
    if term.mask is not None:
        return ("mask", *map(id, term.masks)), size * tf.reduce_mean(tf.cast(term.mask, "float32"))
    inner = values.shape[1:]
    return SIZE if inner.is_fully_defined() else ("size", id(values)), size


def gradient_divisor_of(term: LossTerm) -> tuple[tuple, tf.Tensor]:
    """What the gradient of one loss was divided by, as `divisor_of` has it for the loss.

    They differ for the mean of each example's own masked mean, which is divided by the examples.
    """
    kind, divisor = divisor_of(term)
    if not term.by_example or kind == SUM:
        return kind, divisor
    return SIZE, tf.cast(tf.shape(term.values)[0], "float32")
