"""The forward and backward pass of one batch on one device: inline, or as a function in the graph."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.attributes import NO_INLINE

from keras_paragrad.compat.collectives import replica_count, replica_index
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.state import state_of
from keras_paragrad.engine.losses.sums import LossSums, loss_sums
from keras_paragrad.engine.losses.terms import LossTerm, recorded_terms
from keras_paragrad.engine.losses.undivided import not_divided_by_replicas
from keras_paragrad.engine.replicas.shard import Shard, rows_of
from keras_paragrad.storage.gathering import watch_gathered
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import scale_gradient


class Normalizer(NamedTuple):
    """The divisor of a loss, which is the weight of its gradient among others.

    Attributes:
        value: The divisor, a float32 scalar. The gradient of two micro-batches together is the mean of their
            gradients, weighted by it.
        summed: Whether the loss is a sum, so that gradients are summed.
        stated: The user's `weighting`, or `None` if it follows from the compiled losses.
    """

    value: tf.Tensor
    summed: bool = False
    stated: str | None = None


# Maps a model, the arguments of its `compute_loss` and the recorded loss terms to the weight.
Normalize = Callable[[keras.Model, dict[str, Any], list[LossTerm]], Normalizer]
# Takes the arguments of a `Normalize`.
Look = Callable[[keras.Model, dict[str, Any], list[LossTerm]], None]
# Maps a weight to the factor of the loss in the backward pass.
WeighReplica = Callable[[Normalizer], tf.Tensor]
# Maps a batch, as `train_step` takes it, to a boolean tensor `(rows,)`.
Present = Callable[[Any], tf.Tensor]


class StepContext(NamedTuple):
    """The context of a forward and backward pass.

    Attributes:
        model: A compiled model with Keras's `train_step`.
        shard: Says whether there are examples in the batch.
        normalize: Measures the weight of the gradient; not measured, if `None`.
        weigh_replica: Maps the weight to a factor of the loss.
        sums: Whether to return numerators and denominators of the losses, instead of updating Keras's trackers.
        look: Receives the arguments of `normalize`.
        present: Masks the rows that are examples; all are, if `None`.
        by_xla: Whether XLA compiles the pass alone.
        in_loop: Whether the pass is traced in a loop.
    """

    model: Any
    shard: Shard
    normalize: Normalize | None = None
    weigh_replica: WeighReplica | None = None
    sums: bool = False
    look: Look | None = None
    present: Present | None = None
    by_xla: bool = False
    in_loop: bool = False


class ForwardBackwardResult(NamedTuple):
    """The result of a forward and backward pass.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The model's loss.
        y_pred: The model's outputs.
        weight: The gradient's weight, or `None` if not measured.
        sums: Numerators and denominators of the losses, or `None` if Keras tracks them.
    """

    gradients: list[Any]
    loss: tf.Tensor
    y_pred: Any
    weight: Normalizer | None
    sums: LossSums | None


def forward_backward(context: StepContext, data: Any) -> ForwardBackwardResult:
    """Runs Keras's `train_step` from the inputs to the gradients."""
    model, normalize = context.model, context.normalize
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
        with (
            recorded_terms(model, untracked=context.sums) as terms,
            not_divided_by_replicas() if normalize else contextlib.nullcontext(),
        ):
            loss = model._compute_loss(**arguments, training=True)
        with tape.stop_recording():
            weight = normalize(model, arguments, terms) if normalize else None
            sums = None
            if context.sums:
                sums = loss_sums(model, loss, terms, rows_of(x), weight, divided=normalize is None)
            if context.look:
                # Last: terms cache what they compute, and this computes it in another graph.
                context.look(model, arguments, terms)
            factor = context.weigh_replica(weight) if weight is not None and context.weigh_replica else None
        weighted = loss if factor is None else loss * tf.cast(factor, loss.dtype)
        if weight is not None and not weight.summed and replica_count() > 1:
            weighted *= tf.cast(1 / replica_count(), weighted.dtype)
        scaled = model.optimizer.scale_loss(weighted)
    with _with_replica_weight(model, factor), regather_in_backward(scaled):
        gradients = tape.gradient(scaled, [source(variable) for variable in model.trainable_weights])
    return ForwardBackwardResult(gradients, loss, y_pred, weight, sums)


def forward_backward_in_function(context: StepContext, data: Any) -> ForwardBackwardResult:
    """`forward_backward` as a function in the step's graph.

    On several replicas XLA can compile this function alone, as it knows one device. The replica's weight depends on the
    other replicas, so it is then multiplied with the gradients, outside.

    In a loop without XLA, max-pooling has to be in a function: in a graph with a cycle, oneDNN replaces TensorFlow's
    kernels in no fixed order, and in some processes misses the one of the gradient, which then takes ten times as long.
    """
    traced, by_xla, weigh_replica = [], context.by_xla, context.weigh_replica

    def parts(data):
        result = forward_backward(context._replace(weigh_replica=None) if by_xla else context, data)
        traced.append(result)
        value = None if result.weight is None else result.weight.value
        return result.gradients, result.loss, result.y_pred, value, result.sums.vector if result.sums else None

    gradients, loss, y_pred, value, vector = call_in_function(parts, data, by_xla=by_xla)
    # Take everything but the tensors from the trace.
    weight, sums = traced[-1].weight, traced[-1].sums
    weight = weight and weight._replace(value=value)
    sums = sums and sums._replace(vector=vector)
    if by_xla and weight is not None and weigh_replica:
        gradients = [scale_gradient(gradient, weigh_replica(weight)) for gradient in gradients]
    return ForwardBackwardResult(gradients, loss, y_pred, weight, sums)


def call_in_function(function: Callable[[Any], Any], data: Any, *, by_xla: bool = True) -> Any:
    """Calls a function on one replica without inlining it; its outputs keep their masks."""

    attributes = None if by_xla else {NO_INLINE: True}

    # Traced on each replica: a shared function would run on the first one's device.
    @tf.function(jit_compile=by_xla, autograph=False, experimental_attributes=attributes)
    def call(data):
        outputs = function(data)
        return outputs, [mask_of(output) for output in keras.tree.flatten(outputs)]

    outputs, masks = call(data)
    marked = [with_mask(*pair) for pair in zip(keras.tree.flatten(outputs), masks, strict=True)]
    return keras.tree.pack_sequence_as(outputs, marked)


def replica_weight_of(model: keras.Model) -> tf.Tensor:
    """The factor of the loss in the backward pass that is being traced on this replica."""
    return state_of(model).replica_weights.get(replica_index(), tf.constant(1.0))


@contextlib.contextmanager
def _with_replica_weight(model: keras.Model, factor: tf.Tensor | None) -> Iterator[None]:
    if factor is None:
        yield
        return
    state, here = state_of(model), replica_index()
    state.replica_weights = {**state.replica_weights, here: factor}
    try:
        yield
    finally:
        state.replica_weights = {replica: each for replica, each in state.replica_weights.items() if replica != here}
