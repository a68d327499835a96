"""The *gradient* stage: forward and backward pass of a slice, and the gradient's weight.

A gradient's weight d_r is the divisor of its loss. So that the replicas' gradients g_r sum to the batch's, replica r
multiplies its loss by d_r / sum_s d_s, or by 1 if the loss is a sum.
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
from keras_paragrad.engine.losses.divisors import Divisor
from keras_paragrad.engine.losses.logs import LossSums, has_metrics, loss_sums, update_metrics
from keras_paragrad.engine.losses.loss_divisor import LossDivisor, scale_by_replicas, warn_of_uniform
from keras_paragrad.engine.losses.terms import arguments_of, compute_loss
from keras_paragrad.storage.gathering import watch_gathered
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import scale_gradients

Data = TypeVar("Data")
Result = TypeVar("Result")
# For each replica, the factor of a model's loss in the backward pass that is being traced.
_FACTORS = Slot[Mapping[int, Scalar]]("replica_weights", {})
# Maps the weight of a replica's gradient to the factor of its loss in the backward pass.
WeighReplica = Callable[[Divisor], Scalar]
# Maps a batch, as `train_step` takes it, to a boolean tensor `(rows,)`.
Present = Callable[[Batch], tf.Tensor]


class StepContext(NamedTuple):
    """The context of a forward and backward pass.

    Attributes:
        model: A compiled model with Keras's `train_step`.
        replica_batch: Says whether there are examples in the batch.
        loss_divisor: Measures the weight of the gradient; not measured, if `None`.
        weigh_replica: Maps the weight to the factor of the loss; `equal_share`, if `None`.
        inexact: Whether the loss is divided by the number of replicas here, and not partly by Keras (`exact=False`).
        sums: Whether to return numerators and denominators of the losses, instead of updating Keras's trackers.
        uniform: Whether micro-batches count the same. A loss that says otherwise is warned of.
        present: Masks the rows that are examples; `None` if all rows are.
        by_xla: Whether XLA compiles the pass alone.
        in_loop: Whether the pass is traced in a loop.
        whole: Whether the batch has all of the replica's rows, and not a slice of them.
    """

    model: keras.Model
    replica_batch: ReplicaBatch
    loss_divisor: LossDivisor | None = None
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
        loss: The model's loss, or `None` if `sums` has its numerator.
        weight: The gradient's weight, or `None` if not requested.
        sums: Numerators and denominators of the losses in the logs, or `None` if Keras tracks losses.
        show: For a whole batch, updates loss and metrics as Keras does after the update, and returns the logs.
        reduced: Whether all replicas have the whole batch's gradient, and not each that of its own rows.
    """

    gradients: Gradients
    loss: tf.Tensor | None
    weight: Divisor | None
    sums: LossSums | None = None
    show: Callable[[], StepLogs] | None = None
    reduced: bool = False

    def counting_as_one(self) -> "Gradient":
        """The gradient with weight 1, so that all replicas count equally."""
        weight = self.weight and self.weight._replace(value=tf.ones_like(self.weight.value))
        return self._replace(weight=weight)


def forward_backward(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
    """Runs Keras's `train_step` from the inputs to the gradients; also returns the outputs."""
    model, loss_divisor = context.model, context.loss_divisor
    # Whether Keras is kept from dividing losses by the number of replicas.
    unscaled = loss_divisor is not None or context.inexact
    # Weights in shards are read gathered: `source` maps a variable to the tensor or variable that the tape watches.
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        # The forward pass is included, as layers may compute and add losses.
        with as_one_replica() if unscaled else contextlib.nullcontext():
            loss, arguments, terms = compute_loss(model, data, untracked=context.sums)
        scaled_loss = scale_by_replicas(model, loss, terms) if context.inexact else loss
        with tape.stop_recording():
            weight = loss_divisor(model, arguments, terms).never_zero if loss_divisor else None
            sums = None
            if context.sums:
                rows = rows_of(arguments["x"])
                sums = loss_sums(model, loss, terms, rows, weight, divided=not unscaled)
            if context.uniform:
                # This comes last: terms cache their values, which this call computes in another graph.
                warn_of_uniform(model, terms)
            factor = None if weight is None else (context.weigh_replica or equal_share)(weight)
        weighted = scaled_loss if factor is None else scaled_loss * tf.cast(factor, loss.dtype)
        scaled = model.optimizer.scale_loss(weighted)
    with _with_loss_factor(model, factor), regather_in_backward(scaled):
        gradients = tape.gradient(scaled, [source(variable) for variable in model.trainable_weights])
    return Gradient(gradients, loss, weight, sums), arguments["y_pred"]


def forward_backward_in_function(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
    """`forward_backward` as a function in the step's graph.

    XLA compiles for one device, so on several replicas it compiles this function alone. A replica's factor depends on
    the other replicas, so it multiplies the gradients outside of the function.

    In a loop without XLA, max-pooling has to be in a function. In a graph with a cycle, oneDNN replaces TensorFlow's
    kernels in no fixed order. In some processes it misses the gradient's kernel, which then takes ten times as long.
    """
    weigh_replica = context.weigh_replica if context.by_xla else None
    inside = context._replace(weigh_replica=None) if context.by_xla else context
    gradient, y_pred = in_function(functools.partial(forward_backward, inside), by_xla=context.by_xla)(data)
    return scale_by_replica(context.model, gradient, weigh_replica), y_pred


def in_function(
    function: Callable[[Data], Result], *, by_xla: bool = True, name: str = "call"
) -> Callable[[Data], Result]:
    """Makes a function for one replica that XLA compiles, or without `by_xla` one that TensorFlow never inlines.

    Tensors in the result keep their Keras masks. Other objects in the result are those of the last trace.
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


def equal_share(weight: Divisor) -> float:
    """The factor of a replica's loss if all count equally: 1 / replicas, or 1 for a sum.

    Losses have this factor until their weights are known. Without it, gradients in half precision overflow sooner.
    """
    return 1.0 if weight.summed else 1 / replica_count()


def replica_weight_of(model: keras.Model) -> Scalar | None:
    """The factor of this replica's loss in the backward pass being traced; `None` without a weight."""
    return _FACTORS.of(model).get(replica_index())


@contextlib.contextmanager
def _with_loss_factor(model: keras.Model, factor: Scalar | None) -> Generator[None]:
    """Context of a backward pass in which `replica_weight_of` returns this factor of the loss."""
    if factor is None:
        yield
        return
    here = replica_index()
    _FACTORS.attach(model, {**_FACTORS.of(model), here: factor})
    try:
        yield
    finally:
        _FACTORS.attach(model, {replica: kept for replica, kept in _FACTORS.of(model).items() if replica != here})


# Results of these types are replaced by a function's output tensors.
_TENSORS = (tf.Tensor, tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)
_CONVOLUTIONS = tuple(layer for name, layer in vars(keras.layers).items() if "Conv" in name)


class ReplicaWeight:
    """Computes the factor d_r / sum_s d_s of this replica's loss. Only the first call all-reduces the weights."""

    def __init__(self, replica_batch: ReplicaBatch):
        self.replica_batch = replica_batch
        self._factor: tf.Tensor | None = None

    def __call__(self, weight: Divisor) -> tf.Tensor:
        if self._factor is None:
            self._factor = tf.constant(1.0) if weight.summed else self._reduce(weight)
        return self._factor

    def _reduce(self, weight: Divisor) -> tf.Tensor:
        """The weight's share of the sum over the replicas; an equal share if all weights are 0."""
        value = self.replica_batch.weight(tf.cast(weight.value, "float32"))
        (total,) = sum_over_replicas([value])
        return tf.where(total == 0, equal_share(weight), value / total)


def gradient_of(context: StepContext, data: Batch, **fields: Any) -> Gradient:
    """Runs Keras's `train_step` up to the optimizer: forward pass, loss, backward pass, metrics.

    `fields` replace fields of the context. For a whole batch, `Gradient.show` tracks the loss and metrics later. For a
    part, metrics are updated here, and the loss isn't tracked.
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
    track_loss(model, loss, rows_of(batch["x"]))
    return model.compute_metrics(**batch)


def scale_by_replica(model: keras.Model, gradient: Gradient, weigh_replica: WeighReplica | None) -> Gradient:
    """Gives a weighted gradient the factor of `weigh_replica`, if any, in place of `equal_share`."""
    if gradient.weight is None or weigh_replica is None or gradient.reduced:
        return gradient
    factor = weigh_replica(gradient.weight) / equal_share(gradient.weight)
    return gradient._replace(gradients=scale_gradients(gradient.gradients, model.trainable_weights, factor))


def track_loss(model: keras.Model, loss: tf.Tensor, rows: tf.Tensor) -> None:
    """Adds a batch's loss to the mean that `fit` logs as `loss`."""
    # `compute_loss` has divided the loss by the number of replicas.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    model._loss_tracker.update_state(loss * replicas if replicas > 1 else loss, sample_weight=rows)
