"""The *gradient* stage: forward and backward pass of a slice, and the weight of its gradient in the batch.

A gradient's weight is a `Normalizer`: the divisor of its loss. A replica's loss is multiplied by a factor, so that the
replicas' gradients sum to the batch's.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.private import NO_INLINE
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Batch, Gradients, LossArguments, Scalar, StepLogs, Structure
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, rows_of
from keras_paragrad.engine.calls.replicas import update_metrics_of
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.logs import LossSums, has_metrics, loss_sums, update_metrics
from keras_paragrad.engine.losses.loss_normalization import LossNormalization, scale_by_replicas, warn_of_uniform
from keras_paragrad.engine.losses.terms import arguments_of, compute_loss
from keras_paragrad.storage.gathering import watch_gathered
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import scale_gradients

Data = TypeVar("Data")
Result = TypeVar("Result")
# By replica, the factor of a model's loss in the backward pass that is being traced.
_WEIGHTS = Slot[Mapping[int, Scalar]]("replica_weights", {})
# Maps the weight of a replica's gradient to the factor of its loss in the backward pass.
WeighReplica = Callable[[Normalizer], Scalar]
# Maps a batch, as `train_step` takes it, to a boolean tensor `(rows,)`.
Present = Callable[[Batch], tf.Tensor]


class StepContext(NamedTuple):
    """The context of a forward and backward pass.

    Attributes:
        model: A compiled model with Keras's `train_step`.
        replica_batch: Says whether there are examples in the batch.
        normalize: Measures the weight of the gradient; not measured, if `None`.
        weigh_replica: Maps the weight to the factor of the loss; `equal_share`, if `None`.
        inexact: Whether to scale the loss of a replica that isn't weighted, so that the replicas' gradients are summed;
            otherwise, Keras scales some losses.
        sums: Whether to return numerators and denominators of the losses, instead of updating Keras's trackers.
        uniform: Whether micro-batches count the same, which is warned of if their losses say otherwise.
        present: Masks the rows that are examples; all are, if `None`.
        by_xla: Whether XLA compiles the pass alone.
        in_loop: Whether the pass is traced in a loop.
        whole: Whether the batch is all that the replica has of the step's batch.
    """

    model: keras.Model
    replica_batch: ReplicaBatch
    normalize: LossNormalization | None = None
    weigh_replica: WeighReplica | None = None
    inexact: bool = False
    sums: bool = False
    uniform: bool = False
    present: Present | None = None
    by_xla: bool = False
    in_loop: bool = False
    whole: bool = False


class Gradient(NamedTuple):
    """The gradient of a slice or a batch.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The model's loss, or `None` if it is in `sums`.
        weight: The gradient's weight, or `None` if not requested.
        sums: Numerators and denominators of the losses in the logs, or `None` if Keras tracks them.
        show: For a whole batch, updates loss and metrics as Keras does after the update, and returns the logs.
        reduced: Whether all of this is of the whole batch, on every replica, and not of the replica's part of it.
    """

    gradients: Gradients
    loss: tf.Tensor | None
    weight: Normalizer | None
    sums: LossSums | None = None
    show: Callable[[], StepLogs] | None = None
    reduced: bool = False

    def counting_as_one(self) -> "Gradient":
        """The gradient with weight 1, so that all replicas count equally."""
        weight = self.weight and self.weight._replace(value=tf.ones_like(self.weight.value))
        return self._replace(weight=weight)


def forward_backward(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
    """Runs Keras's `train_step` from the inputs to the gradients; also returns the outputs."""
    model, normalize = context.model, context.normalize
    # Then losses aren't divided by the number of replicas.
    unscaled = normalize is not None or context.inexact
    # Weights in shards are read gathered: `source` maps a variable to the tensor or variable that the tape watches.
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        # Around the forward pass too: layers may compute and add losses.
        with as_one_replica() if unscaled else contextlib.nullcontext():
            loss, arguments, terms = compute_loss(model, data, untracked=context.sums)
        scaled_loss = scale_by_replicas(model, loss, terms) if context.inexact else loss
        with tape.stop_recording():
            weight = normalize(model, arguments, terms).never_zero if normalize else None
            sums = None
            if context.sums:
                rows = rows_of(arguments["x"])
                sums = loss_sums(model, loss, terms, rows, weight, divided=not unscaled)
            if context.uniform:
                # Last: terms cache their values, and this call computes them in another graph.
                warn_of_uniform(model, terms)
            factor = None if weight is None else (context.weigh_replica or equal_share)(weight)
        weighted = scaled_loss if factor is None else scaled_loss * tf.cast(factor, loss.dtype)
        scaled = model.optimizer.scale_loss(weighted)
    with _with_replica_weight(model, factor), regather_in_backward(scaled):
        gradients = tape.gradient(scaled, [source(variable) for variable in model.trainable_weights])
    return Gradient(gradients, loss, weight, sums), arguments["y_pred"]


def forward_backward_in_function(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
    """`forward_backward` as a function in the step's graph.

    On several replicas XLA can compile this function alone, as it knows one device. The replica's weight depends on the
    other replicas, so it multiplies the gradients later, outside.

    In a loop without XLA, max-pooling has to be in a function: in a graph with a cycle, oneDNN replaces TensorFlow's
    kernels in no fixed order, and in some processes misses the gradient's kernel, which then takes ten times as long.
    """
    weigh_replica = context.weigh_replica if context.by_xla else None
    inside = context._replace(weigh_replica=None) if context.by_xla else context
    gradient, y_pred = in_function(functools.partial(forward_backward, inside), by_xla=context.by_xla)(data)
    return scale_by_replica(context.model, gradient, weigh_replica), y_pred


def in_function(
    function: Callable[[Data], Result], *, by_xla: bool = True, name: str = "call"
) -> Callable[[Data], Result]:
    """Wraps a function for one replica, so that TensorFlow doesn't inline it, or so that XLA compiles it if `by_xla`.

    Tensors in its result keep their Keras masks. All other objects in it are the last trace's.
    """
    attributes = None if by_xla else {NO_INLINE: True}
    traced: list[Result] = []

    # Traced on each replica: a shared function would run on the first one's device.
    def call(data: Data):
        traced.append(function(data))
        tensors = [leaf for leaf in keras.tree.flatten(traced[-1]) if isinstance(leaf, _TENSORS)]
        return tensors, list(map(mask_of, tensors))

    call.__name__ = name
    compiled: Any = tf.function(call, jit_compile=by_xla, autograph=False, experimental_attributes=attributes)

    def call_and_pack(data: Data) -> Result:
        tensors = map(with_mask, *compiled(data))
        leaves = [next(tensors) if isinstance(leaf, _TENSORS) else leaf for leaf in keras.tree.flatten(traced[-1])]
        return keras.tree.pack_sequence_as(traced[-1], leaves)

    return call_and_pack


def equal_share(weight: Normalizer) -> float:
    """The factor of a replica's loss if all replicas count equally: 1 / replicas for means, as in Keras, 1 for sums.

    Losses are multiplied by it until their weights are known; without it, gradients in half precision overflow sooner.
    """
    return 1.0 if weight.summed else 1 / replica_count()


def replica_weight_of(model: keras.Model) -> Scalar | None:
    """The factor of the loss in the backward pass that is being traced on this replica, if it has a weight."""
    return _WEIGHTS.of(model).get(replica_index())


@contextlib.contextmanager
def _with_replica_weight(model: keras.Model, factor: Scalar | None) -> Generator[None]:
    """Context of a backward pass in which `replica_weight_of` returns this factor of the loss."""
    if factor is None:
        yield
        return
    here = replica_index()
    _WEIGHTS.attach(model, {**_WEIGHTS.of(model), here: factor})
    try:
        yield
    finally:
        _WEIGHTS.attach(model, {replica: kept for replica, kept in _WEIGHTS.of(model).items() if replica != here})


# Results of these types are replaced by a function's output tensors.
_TENSORS = (tf.Tensor, tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)
_CONVOLUTIONS = tuple(layer for name, layer in vars(keras.layers).items() if "Conv" in name)


class ReplicaWeight:
    """Computes the factor of this replica's loss in the batch; all-reduces weights in the first call only."""

    def __init__(self, replica_batch: ReplicaBatch):
        self.replica_batch = replica_batch
        self._factor: tf.Tensor | None = None

    def __call__(self, weight: Normalizer) -> tf.Tensor:
        """The factor for this replica's loss: its share of the normalizers of all replicas, or 1 for sums."""
        if self._factor is None:
            self._factor = tf.constant(1.0) if weight.summed else self._reduce(weight)
        return self._factor

    def _reduce(self, weight: Normalizer) -> tf.Tensor:
        """The weight's share of the sum over the replicas; an equal share if all weights are 0."""
        value = self.replica_batch.weight(tf.cast(weight.value, "float32"))
        (total,) = sum_over_replicas([value])
        return tf.where(total == 0, equal_share(weight), value / total)


def gradient_of(context: StepContext, data: Batch, **fields: Any) -> Gradient:
    """Runs Keras's `train_step` up to the optimizer: forward pass, loss, backward pass, metrics.

    `fields` replace fields of the context. For a whole batch, `Gradient.show` tracks the loss and metrics later. For
    others, metrics are updated here, and the loss isn't tracked.
    """
    context = context._replace(**fields)
    model, replica_batch = context.model, context.replica_batch
    as_function = context.by_xla or (context.in_loop and is_slower_in_loop(model))
    gradient, y_pred = (forward_backward_in_function if as_function else forward_backward)(context, data)
    assert gradient.loss is not None, "a pass has computed it"
    batch = arguments_of(data, y_pred)
    sums = gradient.sums and gradient.sums.zero_unless(replica_batch.nonempty)
    show = None
    if context.present is not None:
        present = tf.logical_and(context.present(data), replica_batch.rows > 0)
        sums = sums and sums.of_some_rows(tf.math.count_nonzero(present))
        if has_metrics(model):
            replica_batch.only(present).run(lambda: update_metrics(model, _select(batch, present)))
    elif not context.sums and replica_batch.nonempty is None:
        show = functools.partial(_track_batch, model, gradient.loss, batch)
    elif context.whole:
        update_metrics_of(model, batch, replica_batch)
    else:
        replica_batch.run(lambda: update_metrics(model, batch))
    weight = gradient.weight and gradient.weight._replace(value=replica_batch.weight(gradient.weight.value))
    gradients = replica_batch.gradients(gradient.gradients)
    return gradient._replace(gradients=gradients, weight=weight, sums=sums, show=show)


def is_slower_in_loop(model: keras.Model) -> bool:
    """Whether oneDNN misses kernels when the pass is in a loop; see `forward_backward_in_function`."""
    pooling = keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D
    in_graph = not tf.executing_eagerly() and not model.jit_compile
    return in_graph and any(isinstance(layer, pooling) for layer in all_layers(model))


def is_slower_in_xla_loop(model: keras.Model) -> bool:
    """Whether the pass takes XLA two to three times as long in a loop, on CPUs."""
    return any(isinstance(layer, _CONVOLUTIONS) for layer in all_layers(model))


def _select(batch: LossArguments, present: tf.Tensor) -> LossArguments:
    rows = tf.squeeze(tf.where(present), 1)
    return keras.tree.map_structure(lambda tensor: tensor if tensor is None else tf.gather(tensor, rows), batch)


def _track_batch(model: keras.Model, loss: tf.Tensor, batch: LossArguments) -> StepLogs:
    """Updates loss and metrics with a whole batch, and returns the logs."""
    track_loss(model, loss, rows_of(batch["x"]))
    return model.compute_metrics(**batch)


def scale_by_replica(model: keras.Model, gradient: Gradient, weigh_replica: WeighReplica | None) -> Gradient:
    """Replaces the factor `equal_share` of a gradient by `weigh_replica`'s, if given and the gradient has a weight."""
    if gradient.weight is None or weigh_replica is None or gradient.reduced:
        return gradient
    factor = weigh_replica(gradient.weight) / equal_share(gradient.weight)
    return gradient._replace(gradients=scale_gradients(gradient.gradients, model.trainable_weights, factor))


def track_loss(model: keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Adds a batch's loss to the mean that `fit` logs as `loss`."""
    # `compute_loss` has divided the loss by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    model._loss_tracker.update_state(loss * replicas if replicas > 1 else loss, sample_weight=rows)
