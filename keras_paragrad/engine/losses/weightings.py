"""The divisors of losses: the values of `weighting`."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.private import get_keras_mask
from keras_paragrad.compat.types import LossArguments, Scalar, Structure
from keras_paragrad.engine.batches.replica_batch import rows_of
from keras_paragrad.engine.losses.divisors import Normalizer

# The arguments of a `weighting` function.
PARAMETERS = ("x", "y", "y_pred", "sample_weight")
# Maps the arguments, for a part of a batch, to the divisor of its loss.
DivisorFunction = Callable[[Structure, Structure, Structure, Structure], Scalar]


class Weighting(NamedTuple):
    """The divisor of a loss, which is the weight of a part's gradient in the batch's gradient.

    Attributes:
        name: `"examples"`, `"sample_weight"`, `"mask"` or `"sum"`, or the name of a function.
        divisor: Maps the arguments of `compute_loss` to a float32 scalar; `None` for a sum, which is not divided.
    """

    name: str
    divisor: Callable[[LossArguments], tf.Tensor] | None

    def normalizer(self, arguments: LossArguments) -> Normalizer:
        """The normalizer of a part of a batch."""
        if self.divisor is None:
            return Normalizer(tf.constant(1.0), summed=True, stated=self.name)
        return Normalizer(self.divisor(arguments), stated=self.name)

    def value(self, arguments: LossArguments) -> Scalar:
        """The divisor of a part's loss; 0 for a sum."""
        return self.divisor(arguments) if self.divisor else 0.0

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


def output_mask(y_pred: Structure) -> tf.Tensor | None:
    """The mask of the first output that has one."""
    masks = (get_keras_mask(leaf) for leaf in keras.tree.flatten(y_pred))
    return next((mask for mask in masks if mask is not None), None)


def _examples(arguments: LossArguments) -> tf.Tensor:
    return tf.cast(rows_of(arguments["x"]), "float32")


def _sample_weight(arguments: LossArguments) -> tf.Tensor:
    weights = keras.tree.flatten(arguments["sample_weight"])
    return _sum(weights[0]) if weights and weights[0] is not None else _examples(arguments)


def _mask(arguments: LossArguments) -> tf.Tensor:
    mask = output_mask(arguments["y_pred"])
    return _examples(arguments) if mask is None else _sum(mask)


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
