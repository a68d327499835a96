"""One training step of a model, opened at the places where the package has something to do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution

from keras_paragrad._keras.apply import apply_everywhere, unscaled
from keras_paragrad._keras.losses import LossTerm, recorded_terms
from keras_paragrad._keras.optimizer import WrappingOptimizer
from keras_paragrad._keras.replicas import coordinate, replica_count, sum_over_replicas


class Weight(NamedTuple):
    """What a micro-batch's gradient counts for.

    Attributes:
        value: What the loss was divided by, a float32 scalar: the gradient of two micro-batches together is the
            average of their gradients, weighted by it.
        summed: Whether the loss was not divided at all, so that the gradients of two micro-batches add up.
    """

    value: tf.Tensor
    summed: bool = False


class Gradient(NamedTuple):
    """What came out of a forward and backward pass.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The loss as the model computed it.
        rows: How many examples it was computed on.
        weight: What the gradient counts for, or `None` if nobody asked.
    """

    gradients: list[Any]
    loss: tf.Tensor
    rows: tf.Tensor
    weight: Weight | None


# From a model, the arguments its `compute_loss` was called with, and the loss terms it called, to the weight.
Weigh = Callable[[keras.Model, dict[str, Any], list[LossTerm]], Weight]


def rows_of(x: Any) -> tf.Tensor:
    """How many examples a batch of inputs holds."""
    return tf.shape(next(tensor for tensor in keras.tree.flatten(x) if tensor is not None))[0]


def gradient_of(model: keras.Model, data: Any, weigh: Weigh | None = None) -> Gradient:
    """Does what Keras's `train_step` does up to the optimizer: forward, loss, backward, metrics.

    Args:
        model: A compiled model with Keras's own `train_step`.
        data: A batch, as `train_step` takes it.
        weigh: Measures what the gradient counts for.

    Returns:
        The `Gradient`; the loss has not been tracked yet.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
        with recorded_terms(model) as terms:
            loss = model._compute_loss(**arguments, training=True)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_weights)
    weight = weigh(model, arguments, terms) if weigh else None
    model.compute_metrics(**arguments)
    return Gradient(gradients, loss, rows_of(x), weight)


def track_loss(model: keras.Model, gradient: Gradient) -> None:
    """Adds the batch to the mean that `fit` shows as `loss`."""
    model._loss_tracker.update_state(unscale_loss_for_distribution(gradient.loss), sample_weight=gradient.rows)


def apply_gradient(model: keras.Model, gradient: Gradient) -> None:
    """Hands a gradient to the model's optimizer; called on every replica.

    Where the weight is known, replicas' gradients are averaged by it before they are clipped, so that the step is that
    of one device. An optimizer that wraps another sees to that itself.
    """
    optimizer, variables = model.optimizer, model.trainable_weights
    if gradient.weight is None or replica_count() == 1 or isinstance(unscaled(optimizer), WrappingOptimizer):
        optimizer.apply_gradients(zip(gradient.gradients, variables, strict=True))
        return
    value, summed = gradient.weight
    # Keras has divided the loss by the number of replicas, unless it is a sum.
    share = tf.constant(1.0) if summed else value * replica_count()
    averaged = {index: g for index, g in enumerate(gradient.gradients) if g is not None}
    scaled = [tf.cast(share, g.dtype) * tf.convert_to_tensor(g) for g in averaged.values()]
    *totals, weight = sum_over_replicas([*scaled, value])
    factor = tf.constant(1.0) if summed else tf.math.reciprocal_no_nan(weight)
    means = {i: total * tf.cast(factor, total.dtype) for i, total in zip(averaged, totals, strict=True)}
    whole = [means.get(index) for index in range(len(variables))]
    coordinate(lambda run, whole: apply_everywhere(run, optimizer, whole, variables), whole)
