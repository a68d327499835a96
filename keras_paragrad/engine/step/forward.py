"""The forward and backward pass of one batch on one device, in the graph around it or as a function of its own."""

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
from keras_paragrad.storage.gathering import differentiable
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import scaled_gradient


class Normalizer(NamedTuple):
    """The number that a micro-batch's loss was divided by, which is the weight of its gradient.

    Attributes:
        value: The loss's divisor, a float32 scalar: the gradient of two micro-batches together is the average of
            their gradients, weighted by it.
        summed: Whether the loss was not divided at all, so that the gradients of micro-batches are summed.
        stated: The `weighting` that the user asked for, or `None` if the compiled losses tell.
    """

    value: tf.Tensor
    summed: bool = False
    stated: str | None = None


# From a model, the arguments its `compute_loss` was called with, and the loss terms it called, to the weight.
Normalize = Callable[[keras.Model, dict[str, Any], list[LossTerm]], Normalizer]
# Takes what a `Normalize` takes, and gives nothing.
Look = Callable[[keras.Model, dict[str, Any], list[LossTerm]], None]
# From a weight to what the loss is multiplied with before the backward pass.
WeighReplica = Callable[[Normalizer], tf.Tensor]
# From a batch, as `train_step` takes it, to a boolean tensor `(rows,)`.
Present = Callable[[Any], tf.Tensor]


class StepContext(NamedTuple):
    """What a forward and backward pass needs beside its batch; replaced where a slice's differs from the batch's.

    Attributes:
        model: A compiled model with Keras's own `train_step`.
        shard: Whether there are examples in the batch.
        normalize: Measures the weight of the gradient. On replicas, that of a mean is then divided by their number.
        weigh_replica: What the loss is multiplied with, by its weight.
        sums: Whether to tell what the losses are made of, instead of leaving outputs' losses to Keras's trackers.
        look: Is shown what `normalize` would be given.
        present: Says which rows are examples; all are, if `None`.
        by_xla: Whether XLA compiles the forward and backward pass, and nothing else.
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
    """What a forward and backward pass leaves behind.

    Attributes:
        gradients: A gradient for each of the model's `trainable_weights`, or `None` where there is none.
        loss: The loss as the model computed it.
        y_pred: The model's outputs.
        weight: The gradient's weight, or `None` if not requested.
        sums: What the losses are made of, or `None` if Keras keeps track of them.
    """

    gradients: list[Any]
    loss: tf.Tensor
    y_pred: Any
    weight: Normalizer | None
    sums: LossSums | None


def forward_backward(context: StepContext, data: Any) -> ForwardBackwardResult:
    """Does what Keras's `train_step` does from the inputs to the gradients of a batch."""
    model, normalize = context.model, context.normalize
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape, differentiable(tape) as source:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
        with (
            recorded_terms(model, untracked=context.sums) as terms,
            not_divided_by_replicas() if normalize else contextlib.nullcontext(),
        ):
            loss = model._compute_loss(**arguments, training=True)
        with tape.stop_recording():
            weight = normalize(model, arguments, terms) if normalize else None
            found = None
            if context.sums:
                found = loss_sums(model, loss, terms, rows_of(x), weight, divided=normalize is None)
            if context.look:
                # Last, as terms keep what they compute, and this computes it in a graph of its own.
                context.look(model, arguments, terms)
            factor = context.weigh_replica(weight) if weight is not None and context.weigh_replica else None
        shared = loss if factor is None else loss * tf.cast(factor, loss.dtype)
        if weight is not None and not weight.summed and replica_count() > 1:
            shared *= tf.cast(1 / replica_count(), shared.dtype)
        scaled = model.optimizer.scale_loss(shared)
    with _with_replica_weight(model, factor), regather_in_backward(scaled):
        gradients = tape.gradient(scaled, [source(variable) for variable in model.trainable_weights])
    return ForwardBackwardResult(gradients, loss, y_pred, weight, found)


def forward_backward_in_function(context: StepContext, data: Any) -> ForwardBackwardResult:
    """`forward_backward` as a function of its own in the step's graph.

    On several replicas XLA can compile no more than this: it knows one device. What it is given and gives back is then
    the same, but for the replica loss scale, which comes from other replicas and is multiplied with the gradients.

    In a loop without XLA, oneDNN has to see max-pooling apart: in a graph with a cycle it replaces TensorFlow's kernels
    in no order, and in some processes misses that of the gradient, which then takes ten times as long.
    """
    traced, by_xla, weigh_replica = [], context.by_xla, context.weigh_replica

    def parts(data):
        passed = forward_backward(context._replace(weigh_replica=None) if by_xla else context, data)
        traced.append(passed)
        value = None if passed.weight is None else passed.weight.value
        return passed.gradients, passed.loss, passed.y_pred, value, passed.sums.vector if passed.sums else None

    gradients, loss, y_pred, value, vector = call_in_function(parts, data, by_xla=by_xla)
    # What is no tensor is as it was when the step was traced.
    weight, found = traced[-1].weight, traced[-1].sums
    weight = weight and weight._replace(value=value)
    found = found and found._replace(vector=vector)
    if by_xla and weight is not None and weigh_replica:
        gradients = [scaled_gradient(gradient, weigh_replica(weight)) for gradient in gradients]
    return ForwardBackwardResult(gradients, loss, y_pred, weight, found)


def call_in_function(function: Callable[[Any], Any], data: Any, *, by_xla: bool = True) -> Any:
    """Calls a function on one replica that stays one in the graph; the masks on what it returns are kept."""

    attributes = None if by_xla else {NO_INLINE: True}

    # Made anew on each replica: a function that they shared would be traced for the device of the first.
    @tf.function(jit_compile=by_xla, autograph=False, experimental_attributes=attributes)
    def apart(data):
        outputs = function(data)
        return outputs, [mask_of(output) for output in keras.tree.flatten(outputs)]

    outputs, masks = apart(data)
    marked = [with_mask(*pair) for pair in zip(keras.tree.flatten(outputs), masks, strict=True)]
    return keras.tree.pack_sequence_as(outputs, marked)


def replica_weight_of(model: keras.Model) -> tf.Tensor:
    """What the loss was multiplied with in the backward pass that is being traced on this replica."""
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
