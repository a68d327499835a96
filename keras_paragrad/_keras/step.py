"""One training step of a model, opened at the places where the package has something to do."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution

from keras_paragrad._keras.apply import apply_everywhere
from keras_paragrad._keras.capabilities import accumulating, unscaled
from keras_paragrad._keras.forward import Share, Weigh, Weight, compiled_pass, pass_through, scaled_gradient
from keras_paragrad._keras.independence import check_metrics
from keras_paragrad._keras.logs import update_metrics
from keras_paragrad._keras.loss_sums import LossSums
from keras_paragrad._keras.presence import Presence, rows_of
from keras_paragrad._keras.replicas import coordinate, replica_count, sum_over_replicas
from keras_paragrad._keras.uncut import Foreseen


class Gradient(NamedTuple):
    """What came out of a forward and backward pass.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The loss as the model computed it, or `None` if there are only the `sums` of several.
        rows: How many examples it was computed on.
        weight: What the gradient counts for, or `None` if nobody asked.
        sums: What the losses that are shown are made of, or `None` if they are left to Keras.
        show: For a whole batch, tracks its loss and metrics as Keras does after the update, and returns the logs.
    """

    gradients: list[Any]
    loss: tf.Tensor | None
    rows: tf.Tensor
    weight: Weight | None
    sums: LossSums | None = None
    show: Callable[[], dict[str, Any]] | None = None

    def of_all(self, gradients: list[Any], rows: tf.Tensor, divisor: tf.Tensor, losses: tf.Tensor) -> "Gradient":
        """That of a batch of which this is one slice, given the sums over all slices of weights and of losses."""
        weight = self.weight and self.weight._replace(value=divisor)
        return Gradient(gradients, None, rows, weight, self.sums and self.sums._replace(vector=losses))


class Sharing:
    """How much of a batch's gradient one replica's is: its weight in that of all.

    Args:
        presence: Whether this replica has examples.
    """

    def __init__(self, presence: Presence):
        self.presence = presence
        self._known: tf.Tensor | None = None

    def __call__(self, weight: Weight) -> tf.Tensor:
        """What to multiply this replica's loss with, so that the replicas' gradients add up to that of the batch."""
        if self._known is None:
            self._known = self._share(weight)
        return self._known

    def _share(self, weight: Weight) -> tf.Tensor:
        one = tf.constant(1.0)
        if weight.summed:
            return one
        value = self.presence.weight(tf.cast(weight.value, "float32"))
        (total,) = sum_over_replicas([value])
        # The loss is divided by the number of replicas already.
        return tf.where(total > 0, value * replica_count() / total, one)


def gradient_of(
    model: keras.Model,
    data: Any,
    weigh: Weigh | None = None,
    *,
    share: Share | None = None,
    presence: Presence | None = None,
    by_xla: bool = False,
    sums: bool = False,
    foreseen: Foreseen | None = None,
) -> Gradient:
    """Does what Keras's `train_step` does up to the optimizer: forward, loss, backward, metrics.

    Args:
        model: A compiled model with Keras's own `train_step`.
        data: A batch, as `train_step` takes it.
        weigh: Measures what the gradient counts for.
        share: What the loss is multiplied with, by its weight.
        presence: Whether there are examples in the batch; there are, if `None`.
        by_xla: Whether XLA compiles the forward and backward pass, and nothing else.
        sums: Whether to tell what the losses are made of, instead of leaving outputs' losses to Keras's trackers.
        foreseen: Looks at what is not weighed.

    Returns:
        The `Gradient`; the loss has not been tracked yet, and of a whole batch the metrics neither.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    presence = presence or Presence(rows_of(x))
    look = foreseen.look if foreseen else None
    passed = (compiled_pass if by_xla else pass_through)(model, data, weigh, share, sums=sums, look=look)
    batch = {"x": x, "y": y, "y_pred": passed.y_pred, "sample_weight": sample_weight}
    show = None
    if not sums and presence.some is None:
        show = functools.partial(_show, model, passed.loss, batch)
    else:
        presence.run(lambda: update_metrics(model, batch))
    if weigh is not None:
        check_metrics(model, y, passed.y_pred, sample_weight)
    weight = passed.weight and passed.weight._replace(value=presence.weight(passed.weight.value))
    found = passed.sums and passed.sums.only_if(presence.some)
    return Gradient(presence.gradients(passed.gradients), passed.loss, rows_of(x), weight, found, show)


def _show(model: keras.Model, loss: tf.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    track_loss(model, loss, rows_of(batch["x"]))
    return model.compute_metrics(**batch)


def shared(gradient: Gradient, share: Share) -> Gradient:
    """A gradient times its share in that of all replicas."""
    if gradient.weight is None:
        return gradient
    factor = share(gradient.weight)
    return gradient._replace(gradients=[scaled_gradient(each, factor) for each in gradient.gradients])


def track_loss(model: keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Adds a batch's loss, as the model computed it, to the mean that `fit` shows as `loss`; as Keras does."""
    model._loss_tracker.update_state(unscale_loss_for_distribution(loss), sample_weight=rows)


def apply_gradient(
    model: keras.Model, gradients: list[Any], *, whole: bool, beside: Sequence[tf.Tensor] = ()
) -> list[tf.Tensor] | None:
    """Hands gradients to the model's optimizer; called on every replica.

    Args:
        model: A compiled model.
        gradients: A gradient for each of its `trainable_weights`, or `None`.
        whole: Whether the sum over the replicas is exactly the gradient of the batch. Then they are added up before
            they are clipped, so that the step is that of one device. An optimizer that accumulates sees to that itself.
        beside: Other tensors to add up over the replicas, in the same collective.

    Returns:
        Their sums, or `None` if gradients were not added up here.
    """
    optimizer, variables = model.optimizer, model.trainable_weights
    if not variables:
        # As Keras does: such a model is trained for its metrics and what its layers count.
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return None
    if replica_count() == 1 or not whole:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return None
    if accumulating(optimizer):
        if unscaled(optimizer) is not optimizer:
            gradients = _nonfinite_everywhere(gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return None
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    summed = sum_over_replicas([*(gradients[index] for index in present), *beside])
    sums = dict(zip(present, summed, strict=False))
    total = [sums.get(index) for index in range(len(gradients))]
    coordinate(lambda run, total: apply_everywhere(run, optimizer, total, variables), total)
    return summed[len(present) :]


def _nonfinite_everywhere(gradients: list[Any]) -> list[Any]:
    """NaN on every replica if a gradient is not finite on one: a `LossScaleOptimizer` looks at the first alone."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients if each is not None]
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
    (elsewhere,) = sum_over_replicas([tf.cast(tf.logical_not(finite), "float32")])
    poison = tf.where(elsewhere > 0, float("nan"), 1.0)
    return [scaled_gradient(gradient, poison) for gradient in gradients]
