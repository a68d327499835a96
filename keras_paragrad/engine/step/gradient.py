"""The *gradient* stage: forward and backward pass of a slice, and the weight of its gradient in the batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.losses.loss import unscale_loss_for_distribution

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.losses.logs import has_metrics, update_metrics
from keras_paragrad.engine.losses.sums import LossSums
from keras_paragrad.engine.probes.independence import check_metrics
from keras_paragrad.engine.replicas.shard import Shard, rows_of
from keras_paragrad.engine.step.forward import (
    Normalizer,
    StepContext,
    WeighReplica,
    forward_backward,
    forward_backward_in_function,
)
from keras_paragrad.storage.row_gradients import scale_gradient

_CONVOLUTIONS = tuple(layer for name, layer in vars(keras.layers).items() if "Conv" in name)


class Gradient(NamedTuple):
    """The gradient of a slice or a batch.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The model's loss, or `None` if it is in `sums`.
        rows: Number of examples, a scalar.
        weight: The gradient's weight, or `None` if not requested.
        sums: Numerators and denominators of the losses in the logs, or `None` if Keras tracks them.
        show: For a whole batch, updates loss and metrics as Keras does after the update, and returns the logs.
    """

    gradients: list[Any]
    loss: tf.Tensor | None
    rows: tf.Tensor
    weight: Normalizer | None
    sums: LossSums | None = None
    show: Callable[[], dict[str, Any]] | None = None

    def of_all(self, gradients: list[Any], rows: tf.Tensor, divisor: tf.Tensor, losses: tf.Tensor) -> "Gradient":
        """The gradient of the batch that this slice is from, with the sums over all its slices."""
        weight = self.weight and self.weight._replace(value=divisor)
        return Gradient(gradients, None, rows, weight, self.sums and self.sums._replace(vector=losses))

    def counting_as_one(self) -> "Gradient":
        """The gradient with weight 1, so that all replicas count alike."""
        weight = self.weight and self.weight._replace(value=tf.ones_like(self.weight.value))
        return self._replace(weight=weight)


class ReplicaWeight:
    """The weight of this replica's gradient in the batch's; reduced over the replicas once.

    Args:
        shard: Says whether this replica has examples.
    """

    def __init__(self, shard: Shard):
        self.shard = shard
        self._factor: tf.Tensor | None = None

    def __call__(self, weight: Normalizer) -> tf.Tensor:
        """The factor for this replica's loss that makes the sum of all replicas' gradients the batch's."""
        if self._factor is None:
            self._factor = self._reduce(weight)
        return self._factor

    def _reduce(self, weight: Normalizer) -> tf.Tensor:
        one = tf.constant(1.0)
        if weight.summed:
            return one
        value = self.shard.weight(tf.cast(weight.value, "float32"))
        (total,) = sum_over_replicas([value])
        # Keras has divided the loss by the number of replicas.
        return tf.where(total > 0, value * replica_count() / total, one)


def gradient_of(context: StepContext, data: Any, **how: Any) -> Gradient:
    """Runs Keras's `train_step` up to the optimizer: forward pass, loss, backward pass, metrics.

    Args:
        context: The context of the pass.
        data: A batch, as `train_step` takes it.
        **how: Fields of the context to replace.

    Returns:
        The `Gradient`. Its loss is not tracked yet, nor are the metrics of a whole batch.
    """
    context = context._replace(**how)
    model, shard = context.model, context.shard
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    in_function = context.by_xla or (context.in_loop and _is_slower_in_loop(model))
    result = (forward_backward_in_function if in_function else forward_backward)(context, data)
    batch = {"x": x, "y": y, "y_pred": result.y_pred, "sample_weight": sample_weight}
    sums = result.sums and result.sums.only_if(shard.nonempty)
    show = None
    if context.present is not None:
        present = tf.logical_and(context.present(data), shard.rows > 0)
        sums = sums and sums.of_rows(tf.math.count_nonzero(present))
        if has_metrics(model):
            shard.only(present).run(lambda: update_metrics(model, _select_rows(batch, present)))
    elif not context.sums and shard.nonempty is None:
        show = functools.partial(_track_batch, model, result.loss, batch)
    else:
        shard.run(lambda: update_metrics(model, batch))
    if context.normalize is not None:
        check_metrics(model, y, result.y_pred, sample_weight)
    weight = result.weight and result.weight._replace(value=shard.weight(result.weight.value))
    return Gradient(shard.gradients(result.gradients), result.loss, rows_of(x), weight, sums, show)


def _is_slower_in_loop(model: keras.Model) -> bool:
    """Whether oneDNN misses kernels when the pass is in a loop; see `forward_backward_in_function`."""
    pooling = keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D
    in_graph = not tf.executing_eagerly() and not model.jit_compile
    return in_graph and any(isinstance(layer, pooling) for layer in all_layers(model))


def is_slower_in_xla_loop(model: keras.Model) -> bool:
    """Whether the pass takes XLA two to three times as long in a loop, on CPUs."""
    return any(isinstance(layer, _CONVOLUTIONS) for layer in all_layers(model))


def _select_rows(batch: dict[str, Any], present: tf.Tensor) -> dict[str, Any]:
    rows = tf.squeeze(tf.where(present), 1)
    return keras.tree.map_structure(lambda tensor: tensor if tensor is None else tf.gather(tensor, rows), batch)


def _track_batch(model: keras.Model, loss: tf.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    track_loss(model, loss, rows_of(batch["x"]))
    return model.compute_metrics(**batch)


def scale_by_replica(gradient: Gradient, weigh_replica: WeighReplica) -> Gradient:
    """A gradient times this replica's weight."""
    if gradient.weight is None:
        return gradient
    factor = weigh_replica(gradient.weight)
    return gradient._replace(gradients=[scale_gradient(each, factor) for each in gradient.gradients])


def track_loss(model: keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Adds a batch's loss to the mean that `fit` logs as `loss`."""
    model._loss_tracker.update_state(unscale_loss_for_distribution(loss), sample_weight=rows)
