"""Computes losses that compare examples on the outputs of a whole batch, gathered from its parts.

The gradient of the loss with respect to the gathered outputs is computed once; each part's backward pass starts from
the gradient's rows of this part. Known as gradient caching: Gao et al., 2021, https://arxiv.org/abs/2101.06983.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.layers import call_model, has_gradient, mask_of, with_mask
from keras_paragrad.compat.model import added_losses_by_layer, overrides_compute_loss, replace_added_losses
from keras_paragrad.compat.private import FuncGraph
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor, LossArguments, Structure, TensorVariable
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.logs import update_metrics
from keras_paragrad.engine.losses.sums import LossSums, loss_sums
from keras_paragrad.engine.losses.terms import LossTerm, arguments_of, recorded_terms
from keras_paragrad.engine.probes.independence import check_metrics
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch
from keras_paragrad.engine.step.gradient import Gradient, StepContext, call_in_function, track_batch
from keras_paragrad.engine.step.operations import check_runs_twice
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.storage.gathering import watch_gathered
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import add_gradients, scale_gradient

Result = TypeVar("Result")


class OutputForm(NamedTuple):
    """The layout of the tensors of a forward pass: leaves of the outputs, masks, and losses that layers added.

    Attributes:
        structure: The nesting of the outputs.
        masked: The indices of the leaves that have a mask.
        adding: The layers that added a loss with a value for each example.
    """

    structure: Structure
    masked: tuple[int, ...]
    adding: tuple[keras.layers.Layer, ...]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Structure:
        """The nested outputs, with their masks."""
        count = len(keras.tree.flatten(self.structure))
        masks = dict(zip(self.masked, tensors[count:], strict=False))
        # A mask is an attribute of a tensor, and must not change the given one.
        leaves = [with_mask(tf.identity(tensor), masks.get(index)) for index, tensor in enumerate(tensors[:count])]
        return keras.tree.pack_sequence_as(self.structure, leaves)

    def add_losses(self, model: keras.Model, tensors: Sequence[tf.Tensor]) -> None:
        """Makes the layers hold the added losses that a call on the whole batch adds."""
        replace_added_losses(model, zip(self.adding, tensors[len(tensors) - len(self.adding) :], strict=True))


def forward(model: keras.Model, x: Structure, *, training: bool = True) -> tuple[list[tf.Tensor], OutputForm]:
    """Calls a model; returns its outputs, masks and added losses as tensors with a row for each example."""
    y_pred = call_model(model, x, training=training)
    leaves = keras.tree.flatten(y_pred)
    masks = [mask_of(leaf) for leaf in leaves]
    masked = tuple(index for index, mask in enumerate(masks) if mask is not None)
    added = added_losses_by_layer(model)
    tensors = [*leaves, *(mask for mask in masks if mask is not None), *(loss for _, loss in added)]
    structure = keras.tree.map_structure(lambda leaf: None, y_pred)
    return tensors, OutputForm(structure, masked, tuple(layer for layer, _ in added))


def trace(model: keras.Model, run: Callable[[], Result]) -> Result:
    """Traces a forward pass into a graph that never runs, without side effects; refuses unrepeatable operations."""
    with FuncGraph("forward").as_default() as graph, untouched(model, never_run()):
        result = run()
    check_runs_twice(model.name, graph.get_operations())
    return result


# Collectives add integers as float64, which can't represent all integers of 64 bits.
_LONG = (tf.int64, tf.uint64)


class _RowGatherer:
    """Gathers the rows of all replicas, in order, and slices this replica's rows, or a filler row, out again.

    All-gathers need equal sizes, so each replica pads its rows with zeros to the size of the batch, and all-reduces.
    """

    def __init__(self, batch: ReplicaBatch):
        self.batch = batch
        if replica_count() > 1:
            here = tf.one_hot(replica_index(), replica_count(), dtype=tf.float32)
            (counts,) = sum_over_replicas([here * tf.cast(batch.rows, "float32")])
            counts = tf.cast(counts, "int32")
            self.first, self.total = tf.reduce_sum(counts[: replica_index()]), tf.reduce_sum(counts)

    def gather(self, nested: Structure) -> Structure:
        """The rows of all replicas."""
        if replica_count() == 1:
            return nested
        leaves = keras.tree.flatten(nested)
        present = [index for index, leaf in enumerate(leaves) if leaf is not None]
        sums = sum_over_replicas([self._pad(leaves[index]) for index in present])
        for index, total in zip(present, sums, strict=True):
            dtype = leaves[index].dtype
            total = tf.bitcast(total, dtype) if dtype in _LONG else tf.cast(total, dtype)
            total.set_shape([None, *leaves[index].shape[1:]])
            leaves[index] = total
        return keras.tree.pack_sequence_as(nested, leaves)

    def _pad(self, tensor: tf.Tensor) -> tf.Tensor:
        """Puts this replica's rows, without filler, in their place among zeros for the whole batch's rows.

        The sum over replicas then concatenates. Booleans become int32, and 64-bit integers pairs of int32 in a last
        axis: collectives would round them.
        """
        if tensor.dtype in _LONG:
            tensor = tf.bitcast(tensor, tf.int32)
        elif tensor.dtype.is_bool:
            tensor = tf.cast(tensor, "int32")
        after = self.total - self.first - self.batch.rows
        paddings = tf.concat([[[self.first, after]], tf.zeros([tensor.shape.rank - 1, 2], "int32")], 0)
        return tf.pad(self.batch.drop_filler(tensor), paddings)  # pyright: ignore

    def of_replica(self, tensor: GradientTensor | None) -> tf.Tensor | None:
        """This replica's rows of a gathered tensor; of an empty batch, a filler row of zeros."""
        if tensor is None:
            return None
        tensor = tf.convert_to_tensor(tensor)
        if replica_count() == 1:
            return tensor
        rows = tensor[self.first : self.first + self.batch.rows]
        if self.batch.nonempty is None:
            return rows
        return tf.cond(self.batch.nonempty, lambda: rows, lambda: tf.zeros_like(tensor[:1]))


class WholeLoss(NamedTuple):
    """The loss of a whole batch, and its gradient.

    Attributes:
        loss: The loss.
        cotangents: For each tensor of this replica's forward pass, the gradient of the loss, or `None`.
        gradients: For each trainable weight, this replica's share of the gradient that doesn't flow through the
            outputs, but from regularizers and from weights that `compute_loss` reads; or `None`.
        sums: This replica's share of the losses to log; `None` on one device.
        batch: The arguments of `compute_loss`, with this replica's rows.
    """

    loss: tf.Tensor
    cotangents: list[tf.Tensor | None]
    gradients: Gradients
    sums: LossSums | None
    batch: LossArguments


def whole_loss(context: StepContext, data: Batch, tensors: Sequence[tf.Tensor], form: OutputForm) -> WholeLoss:
    """Computes the loss of a batch as Keras does, and its gradient with respect to the outputs of all replicas.

    `tensors` are the results of this replica's `forward`, and `form` is their layout.
    """
    model, rows = context.model, _RowGatherer(context.replica_batch)
    whole = _gather(model, data, tensors, rows)
    differentiable = [index for index, tensor in enumerate(whole.tensors) if has_gradient(tensor)]
    watched = [whole.tensors[index] for index in differentiable]
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tape.watch(watched)
        loss, terms = whole.loss(model, form, training=True)
        scaled = model.optimizer.scale_loss(loss)
    weights = [source(variable) for variable in model.trainable_weights]
    computed: list[GradientTensor | None] = tape.gradient(scaled, [*watched, *weights])  # pyright: ignore
    of_outputs, of_weights = computed[: len(watched)], computed[len(watched) :]
    by_index = dict(zip(differentiable, of_outputs, strict=True))
    cotangents = [by_index.get(index) for index in range(len(tensors))]
    # All replicas compute the same gradient, and their shares are summed.
    share = tf.constant(1 / replica_count())
    gradients = [scale_gradient(gradient, share) for gradient in of_weights]
    batch = arguments_of(data, form.pack(tensors))
    sums = _share_of_sums(model, loss, terms, rows) if context.sums else None
    return WholeLoss(loss, [rows.of_replica(cotangent) for cotangent in cotangents], gradients, sums, batch)


class _WholeBatch(NamedTuple):
    """The tensors of a forward pass on a whole batch, and the arguments of `compute_loss` except `y_pred`."""

    tensors: list[tf.Tensor]
    arguments: LossArguments

    def loss(self, model: keras.Model, form: OutputForm, *, training: bool) -> tuple[tf.Tensor, list[LossTerm]]:
        """The loss, and the terms of compiled losses."""
        form.add_losses(model, self.tensors)
        untracked = replica_count() > 1
        with recorded_terms(model, untracked=untracked) as terms, as_one_replica():
            return model._compute_loss(**self.arguments, y_pred=form.pack(self.tensors), training=training), terms


def _gather(model: keras.Model, data: Batch, tensors: Sequence[tf.Tensor], rows: _RowGatherer) -> _WholeBatch:
    """Gathers the rows of all replicas: the tensors of their forward passes, and their data."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    # Keras's own `compute_loss` ignores the inputs, which may be large.
    inputs = x if overrides_compute_loss(model) else None
    gathered: Any = rows.gather({"outputs": list(tensors), "x": inputs, "y": y, "sample_weight": sample_weight})
    outputs = gathered.pop("outputs")
    return _WholeBatch(outputs, {**gathered, "x": x} if inputs is None else gathered)


def _share_of_sums(model: keras.Model, loss: tf.Tensor, terms: list[LossTerm], rows: _RowGatherer) -> LossSums:
    """This replica's share of the losses to log, which every replica has computed for the whole batch."""
    sums = loss_sums(model, loss, terms, rows.total)
    return sums._replace(vector=sums.vector / replica_count())


def backward(model: keras.Model, x: Structure, cotangents: Sequence[tf.Tensor | None]) -> list[GradientTensor | None]:
    """Runs the forward pass of a part of a batch again, and its backward pass; returns the gradients of the weights.

    It starts from a cotangent, or `None`, for each tensor of `forward`.
    """
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tensors, _ = forward(model, x)
    return _gradients(tape, tensors, [source(variable) for variable in model.trainable_weights], cotangents)


def _gradients(
    tape: tf.GradientTape,
    tensors: Sequence[tf.Tensor],
    weights: Sequence[TensorVariable],
    cotangents: Sequence[tf.Tensor | None],
) -> list[GradientTensor | None]:
    """Backpropagates the gradient of the loss with respect to a part's tensors."""
    pairs = [pair for pair in zip(tensors, cotangents, strict=True) if pair[1] is not None]
    if not pairs:
        return [None] * len(weights)
    targets, output_gradients = map(list, zip(*pairs, strict=True))
    with regather_in_backward(output_gradients[0]):
        return tape.gradient(targets, list(weights), output_gradients=output_gradients)  # pyright: ignore


def gradient_of_replica(context: StepContext, data: Batch) -> Gradient:
    """The gradient of a replica batch whose loss compares examples across replicas."""
    model = context.model
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    run = functools.partial(forward, model)
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        # The forward pass alone: XLA can't compile the collectives of the loss.
        tensors, form = call_in_function(run, x) if context.by_xla else run(x)
    whole = whole_loss(context, data, tensors, form)
    weights = [source(variable) for variable in model.trainable_weights]
    gradients = context.replica_batch.gradients(_gradients(tape, tensors, weights, whole.cotangents))
    return gradient_of_batch(context, list(map(add_gradients, gradients, whole.gradients)), whole)


def gradient_of_batch(context: StepContext, gradients: Gradients, whole: WholeLoss) -> Gradient:
    """The `Gradient` of a replica batch, which is summed over the replicas.

    On one device, Keras's trackers get the loss and the metrics; on several, metrics are updated here.
    """
    model, batch = context.model, whole.batch
    if whole.sums is None:
        show = functools.partial(track_batch, model, whole.loss, batch)
        return Gradient(list(gradients), whole.loss, None, None, show)
    context.replica_batch.run(lambda: update_metrics(model, batch))
    check_metrics(model, batch)
    weight = Normalizer(tf.constant(1.0), summed=True)
    return Gradient(list(gradients), whole.loss, weight, whole.sums)


def evaluate_whole(model: keras.Model, data: Batch, batch: ReplicaBatch) -> tuple[Structure, LossSums]:
    """The outputs of a replica batch, and its share of the loss of the whole batch, which compares all examples."""
    rows = _RowGatherer(batch)
    tensors, form = forward(model, keras.utils.unpack_x_y_sample_weight(data)[0], training=False)
    loss, terms = _gather(model, data, tensors, rows).loss(model, form, training=False)
    return form.pack(tensors), _share_of_sums(model, loss, terms, rows)
