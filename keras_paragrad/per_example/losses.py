"""Per-example losses, and the check that a loss is separable by example."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.losses import loss_mixes_rows

_CHECKED: "weakref.WeakSet[keras.losses.Loss]" = weakref.WeakSet()


def check_loss(term: LossTerm) -> None:
    """Refuses a loss that is not a sum over the examples of a batch.

    Raises:
        ValueError: The loss overrides `__call__`, returns one number for the whole batch, or its value for an example
            depends on the other examples.
    """
    loss: Any = term.loss
    if loss in _CHECKED:
        return
    if term.reduces_itself:
        raise ValueError(
            f"The loss {loss.name!r} overrides __call__, so how it reduces the losses of the examples is unknown. "
            "Override call(y_true, y_pred) instead, and return one value per example."
        )
    if term.values.shape.rank == 0:
        raise ValueError(
            f"The loss {loss.name!r} returns one number for the whole batch, so an example has no loss of its own. "
            "Return one value per example; for Dice and Tversky, pass axis= without the batch axis 0."
        )
    if loss_mixes_rows(term, one_value_each=True):
        raise ValueError(
            f"The value of the loss {loss.name!r} for one example depends on the others in the batch, so an example "
            "has no gradient of its own. Use a loss that is a sum over the examples."
        )
    _CHECKED.add(loss)


def row_losses(term: LossTerm) -> tf.Tensor:
    """Each example's own loss, `(batch,)`: the loss of that example alone, times its sample weight.

    Args:
        term: The loss and its arguments; values that a mask keeps are averaged or summed within each example.
    """
    values = tf.cast(term.values, "float32")
    mask = tf.ones_like(values) if term.mask is None else tf.cast(term.mask, "float32")
    weight = tf.constant(1.0) if term.sample_weight is None else tf.cast(term.sample_weight, "float32")
    weight = tf.reshape(
        weight, tf.concat([tf.shape(weight), tf.ones([values.shape.rank - weight.shape.rank], tf.int32)], 0)
    )
    inner = list(range(1, values.shape.rank))
    total = tf.reduce_sum(values * weight * mask, inner)
    return total if term.is_sum else total * tf.math.reciprocal_no_nan(tf.reduce_sum(mask, inner))
