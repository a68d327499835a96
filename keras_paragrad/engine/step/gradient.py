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
from keras_paragrad.storage.row_gradients import scaled_gradient

_CONVOLUTIONS = tuple(layer for name, layer in vars(keras.layers).items() if "Conv" in name)


class Gradient(NamedTuple):
    """What came out of a forward and backward pass.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The loss as the model computed it, or `None` if there are only the `sums` of several.
        rows: How many examples it was computed on.
        weight: The gradient's weight, or `None` if not requested.
        sums: What the losses that are shown are made of, or `None` if they are left to Keras.
        show: For a whole batch, tracks its loss and metrics as Keras does after the update, and returns the logs.
    """

    gradients: list[Any]
    loss: tf.Tensor | None
    rows: tf.Tensor
    weight: Normalizer | None
    sums: LossSums | None = None
    show: Callable[[], dict[str, Any]] | None = None

    def of_all(self, gradients: list[Any], rows: tf.Tensor, divisor: tf.Tensor, losses: tf.Tensor) -> "Gradient":
        """That of a batch of which this is one slice, given the sums over all slices of weights and of losses."""
        weight = self.weight and self.weight._replace(value=divisor)
        return Gradient(gradients, None, rows, weight, self.sums and self.sums._replace(vector=losses))

    def counting_as_one(self) -> "Gradient":
        """This, weighing as much on each replica, whatever it was computed on."""
        weight = self.weight and self.weight._replace(value=tf.ones_like(self.weight.value))
        return self._replace(weight=weight)


class ReplicaWeight:
    """How much of a batch's gradient one replica's is: its weight in that of all.

    Args:
        shard: Whether this replica has examples.
    """

    def __init__(self, shard: Shard):
        self.shard = shard
        self._known: tf.Tensor | None = None

    def __call__(self, weight: Normalizer) -> tf.Tensor:
        """The factor of this replica's loss with which the sum of the replicas' gradients is that of the batch."""
        if self._known is None:
            self._known = self._share(weight)
        return self._known

    def _share(self, weight: Normalizer) -> tf.Tensor:
        one = tf.constant(1.0)
        if weight.summed:
            return one
        value = self.shard.weight(tf.cast(weight.value, "float32"))
        (total,) = sum_over_replicas([value])
        # The loss is divided by the number of replicas already.
        return tf.where(total > 0, value * replica_count() / total, one)


def gradient_of(context: StepContext, data: Any, **how: Any) -> Gradient:
    """Does what Keras's `train_step` does up to the optimizer: forward, loss, backward, metrics.

    Args:
        context: What the pass needs beside the batch.
        data: A batch, as `train_step` takes it.
        **how: What replaces parts of the context.

    Returns:
        The `Gradient`; the loss has not been tracked yet, and of a whole batch the metrics neither.
    """
    context = context._replace(**how)
    model, shard = context.model, context.shard
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    in_function = context.by_xla or (context.in_loop and _is_slower_in_loop(model))
    passed = (forward_backward_in_function if in_function else forward_backward)(context, data)
    batch = {"x": x, "y": y, "y_pred": passed.y_pred, "sample_weight": sample_weight}
    found = passed.sums and passed.sums.only_if(shard.nonempty)
    show = None
    if context.present is not None:
        there = tf.logical_and(context.present(data), shard.rows > 0)
        found = found and found.of_rows(tf.math.count_nonzero(there))
        if has_metrics(model):
            shard.only(there).run(lambda: update_metrics(model, _rows_of_batch(batch, there)))
    elif not context.sums and shard.nonempty is None:
        show = functools.partial(_show, model, passed.loss, batch)
    else:
        shard.run(lambda: update_metrics(model, batch))
    if context.normalize is not None:
        check_metrics(model, y, passed.y_pred, sample_weight)
    weight = passed.weight and passed.weight._replace(value=shard.weight(passed.weight.value))
    return Gradient(shard.gradients(passed.gradients), passed.loss, rows_of(x), weight, found, show)


def _is_slower_in_loop(model: keras.Model) -> bool:
    """Whether oneDNN misses kernels of the pass in the graph of a loop; see `forward_backward_in_function`."""
    pooling = keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D
    in_graph = not tf.executing_eagerly() and not model.jit_compile
    return in_graph and any(isinstance(layer, pooling) for layer in all_layers(model))


def is_slower_in_xla_loop(model: keras.Model) -> bool:
    """Whether XLA runs the pass two to three times as long in a loop as by itself, on CPUs."""
    return any(isinstance(layer, _CONVOLUTIONS) for layer in all_layers(model))


def _rows_of_batch(batch: dict[str, Any], there: tf.Tensor) -> dict[str, Any]:
    rows = tf.squeeze(tf.where(there), 1)
    return keras.tree.map_structure(lambda tensor: tensor if tensor is None else tf.gather(tensor, rows), batch)


def _show(model: keras.Model, loss: tf.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    track_loss(model, loss, rows_of(batch["x"]))
    return model.compute_metrics(**batch)


def scaled(gradient: Gradient, weigh_replica: WeighReplica) -> Gradient:
    """A gradient times its share in that of all replicas."""
    if gradient.weight is None:
        return gradient
    factor = weigh_replica(gradient.weight)
    return gradient._replace(gradients=[scaled_gradient(each, factor) for each in gradient.gradients])


def track_loss(model: keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Adds a batch's loss, as the model computed it, to the mean that `fit` shows as `loss`; as Keras does."""
    model._loss_tracker.update_state(unscale_loss_for_distribution(loss), sample_weight=rows)
