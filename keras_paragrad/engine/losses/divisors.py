"""What a loss divides its sum over elements by, as Keras's losses say or as `weighting` states."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.private import get_keras_mask
from keras_paragrad.compat.types import LossArguments, Scalar, Structure
from keras_paragrad.engine.batches.replica_batch import rows_of
from keras_paragrad.engine.losses.terms import LossTerm

# Identifies what a divisor counts: a word, and the `id`s of the counted tensors.
DivisorKey = tuple[Any, ...]
SUM = ("sum",)
SIZE = ("size",)
# A weight so small that rounding removes it beside any other weight.
_LEAST = 1e-25


class Divisor(NamedTuple):
    """What a loss is divided by, and so the weight of its gradient in a sum.

    Attributes:
        value: The divisor d, a float32 scalar. The gradient of two micro-batches together is
            (d1 * g1 + d2 * g2) / (d1 + d2).
        summed: Whether the loss is a sum, so that gradients are summed.
        stated: The user's `weighting`, or `None` if the divisor follows from the compiled losses.
    """

    value: tf.Tensor
    summed: bool = False
    stated: str | None = None

    @property
    def never_zero(self) -> "Divisor":
        """The divisor, or a tiny one in place of 0. So regularizers count even if all parts of an update have 0."""
        return self._replace(value=tf.where(self.value == 0, _LEAST, self.value))


class UnknownDivisorError(ValueError):
    """The divisor of a loss is unknown."""


def divisor_of(term: LossTerm) -> tuple[DivisorKey, tf.Tensor]:
    """A key, and the divisor of one loss as a float32 scalar; 1 for a sum.

    Two terms of equal keys have proportional divisors. `SUM` is the key of losses that aren't divided, and `SIZE` that
    of losses divided by a fixed multiple of the number of rows.
    """
    if term.reduces_itself:
        raise UnknownDivisorError(f"The loss {term.loss.name!r} overrides __call__, so its divisor is unknown.")
    values = term.values
    # This includes reduction "sum", as the one number may be a mean over the batch.
    if values.shape.rank == 0:
        raise UnknownDivisorError(
            f"The loss {term.loss.name!r} returns one number for the whole batch, so its divisor is unknown. Let it "
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
    # Rows of unknown size may be longer in another part, so the divisor is no fixed multiple of their number.
    inner = values.shape[1:]
    return SIZE if inner.is_fully_defined() else ("size", id(values)), size


# The arguments of a `weighting` function.
PARAMETERS = ("x", "y", "y_pred", "sample_weight")
# Maps the arguments, for a part of a batch, to the divisor of its loss.
DivisorFunction = Callable[[Structure, Structure, Structure, Structure], Scalar]


class Weighting(NamedTuple):
    """A rule for the divisor of a loss, as the user states it with `weighting`.

    Attributes:
        name: `"examples"`, `"sample_weight"`, `"mask"` or `"sum"`, or the name of a function.
        divisor: Maps the arguments of `compute_loss` to a float32 scalar; `None` for a sum, which is not divided.
    """

    name: str
    divisor: Callable[[LossArguments], tf.Tensor] | None

    def of_part(self, arguments: LossArguments) -> Divisor:
        if self.divisor is None:
            return Divisor(tf.constant(1.0), summed=True, stated=self.name)
        return Divisor(self.divisor(arguments), stated=self.name)

    @property
    def argument(self) -> str:
        """The value of `weighting` as it is typed."""
        return repr(self.name) if self.name in WEIGHTINGS else self.name


def weighting_of(stated: str | DivisorFunction) -> Weighting | None:
    """The weighting that a user states, or `None` for `"auto"`."""
    if isinstance(stated, str):
        return WEIGHTINGS.get(stated)

    def divisor(arguments: LossArguments) -> tf.Tensor:
        value = tf.convert_to_tensor(stated(*(arguments[key] for key in PARAMETERS)))
        if value.shape.rank != 0:
            raise ValueError(
                f"The function {name!r} of `weighting` returned a tensor of shape {value.shape}, and must return one "
                "number: the divisor of the loss of a part of a batch. Write keras.ops.sum(...) around it."
            )
        return tf.cast(value, "float32")

    name = getattr(stated, "__name__", type(stated).__name__)
    return Weighting(name, divisor)


def _examples(arguments: LossArguments) -> tf.Tensor:
    return tf.cast(rows_of(arguments["x"]), "float32")


def _sample_weight(arguments: LossArguments) -> tf.Tensor:
    weights = keras.tree.flatten(arguments["sample_weight"])
    return _sum(weights[0]) if weights and weights[0] is not None else _examples(arguments)


def _mask(arguments: LossArguments) -> tf.Tensor:
    masks = (get_keras_mask(leaf) for leaf in keras.tree.flatten(arguments["y_pred"]))
    return next((_sum(mask) for mask in masks if mask is not None), _examples(arguments))


def _sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(tensor, "float32"))


WEIGHTINGS = {
    weighting.name: weighting
    for weighting in (
        Weighting("examples", _examples),
        Weighting("sample_weight", _sample_weight),
        Weighting("mask", _mask),
        Weighting("sum", None),
    )
}
