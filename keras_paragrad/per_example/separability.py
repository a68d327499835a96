"""Refuses layers and losses that mix examples, since then an example has no gradient of its own."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.losses import loss_mixes_rows
from keras_paragrad.engine.probes.row_independence import find_mixing_layer

_MIXING_LAYERS: "weakref.WeakKeyDictionary[keras.layers.Layer, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_SEPARABLE_LOSSES: "weakref.WeakSet[keras.losses.Loss]" = weakref.WeakSet()


def check_separable_layer(layer: keras.layers.Layer, *arguments: Any, training: bool = True) -> None:
    """Raises a `ValueError` if a built layer mixes examples; cached by the shapes and dtypes of the arguments."""
    cache = _MIXING_LAYERS.setdefault(layer, {})
    key = (training, *call_signature(arguments))
    if key not in cache:
        cache[key] = find_mixing_layer(layer, *arguments, training=training)
    if cache[key]:
        raise ValueError(
            f"The output of {cache[key]!r} for one example depends on the others in the batch, so an example has no "
            "gradient of its own. Don't reduce over the batch axis 0."
        )


def check_separable_model(model: Any) -> None:
    """Refuses a model that mixes examples, if its input shapes are known."""
    if getattr(model, "inputs", None):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        check_separable_layer(
            model, keras.tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), inputs)
        )


def check_separable_loss(term: LossTerm) -> None:
    """Refuses a loss that is not a sum over the examples of a batch."""
    loss = term.loss
    if loss in _SEPARABLE_LOSSES:
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
    _SEPARABLE_LOSSES.add(loss)


def example_losses(term: LossTerm) -> tf.Tensor:
    """Each example's masked loss times its sample weight, `(batch,)`, as in a batch of that example alone."""
    values = tf.cast(term.values, "float32")
    mask = tf.ones_like(values) if term.mask is None else tf.cast(term.mask, "float32")
    weight = tf.constant(1.0) if term.sample_weight is None else tf.cast(term.sample_weight, "float32")
    weight = tf.reshape(
        weight, tf.concat([tf.shape(weight), tf.ones([values.shape.rank - weight.shape.rank], tf.int32)], 0)
    )
    inner = list(range(1, values.shape.rank))
    total = tf.reduce_sum(values * weight * mask, inner)
    return total if term.is_sum else total * tf.math.reciprocal_no_nan(tf.reduce_sum(mask, inner))


def call_signature(arguments: object) -> list[object]:
    """The dtypes and shapes of nested arguments, without the batch axis: calls that agree in them are alike."""
    return [
        (value.dtype, *value.shape[1:]) if tf.is_tensor(value) or isinstance(value, tf.TensorSpec) else repr(value)
        for value in keras.tree.flatten(arguments)
    ]
