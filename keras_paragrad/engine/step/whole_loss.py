"""The loss of a whole batch from the outputs of its parts, for losses that compare examples.

The gradient with respect to the outputs is computed on those of the whole batch, and each part's backward pass begins
with its rows of it: gradient caching (Gao et al., 2021, https://arxiv.org/abs/2101.06983).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.layers import has_gradient, mask_of, with_mask
from keras_paragrad.compat.model import added_losses_by_layer, overrides_compute_loss, replace_added_losses
from keras_paragrad.compat.types import Batch, Gradients, GradientTensor, LossArguments, Structure
from keras_paragrad.engine.losses.divisors import Normalizer, without_replica_division
from keras_paragrad.engine.losses.logs import update_metrics
from keras_paragrad.engine.losses.sums import LossSums, loss_sums
from keras_paragrad.engine.losses.terms import LossTerm, recorded_terms
from keras_paragrad.engine.probes.independence import check_metrics
from keras_paragrad.engine.probes.untouched import never_run, untouched
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch, rows_of
from keras_paragrad.engine.step.gradient import Gradient, StepContext, call_in_function, track_batch
from keras_paragrad.engine.step.operations import check_runs_twice
from keras_paragrad.storage.gathering import watch_gathered
from keras_paragrad.storage.regathering import regather_in_backward
from keras_paragrad.storage.row_gradients import add_gradients, scale_gradient

Result = TypeVar("Result")


class OutputForm(NamedTuple):
    """How the tensors of a forward pass make up the model's outputs.

    Attributes:
        structure: The outputs, whose leaves come first.
        masked: The numbers of the leaves with a mask; their masks follow.
        adding: The layers that added losses of a value for each example, which come last.
    """

    structure: Structure
    masked: tuple[int, ...]
    adding: tuple[keras.layers.Layer, ...]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Structure:
        """The outputs, with their masks."""
        count = len(keras.tree.flatten(self.structure))
        masks = dict(zip(self.masked, tensors[count:], strict=False))
        # A new tensor, as a mask is an attribute.
        leaves = [with_mask(tf.identity(each), masks.get(index)) for index, each in enumerate(tensors[:count])]
        return keras.tree.pack_sequence_as(self.structure, leaves)

    def add_losses(self, model: keras.Model, tensors: Sequence[tf.Tensor]) -> None:
        """Gives the layers their added losses, as a call on the whole batch does."""
        replace_added_losses(model, zip(self.adding, tensors[len(tensors) - len(self.adding) :], strict=True))


def forward(model: Any, x: Structure, *, training: bool = True) -> tuple[list[tf.Tensor], OutputForm]:
    """Calls a model; returns tensors that have a row for each example."""
    y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
    leaves = keras.tree.flatten(y_pred)
    masks = [mask_of(leaf) for leaf in leaves]
    masked = tuple(index for index, mask in enumerate(masks) if mask is not None)
    added = added_losses_by_layer(model)
    tensors = [*leaves, *(mask for mask in masks if mask is not None), *(loss for _, loss in added)]
    return tensors, OutputForm(y_pred, masked, tuple(layer for layer, _ in added))


def trace(model: keras.Model, run: Callable[[], Result]) -> Result:
    """Runs a forward pass in a graph that never runs, and leaves the model as it is.

    Raises:
        ValueError: A second run could differ from the first.
    """
    with FuncGraph("forward").as_default() as graph, untouched(model, never_run()):
        result = run()
    check_runs_twice(model.name, graph.get_operations())
    return result


# Collectives add integers as float64, which has no room for all of these.
_LONG = (tf.int64, tf.uint64)


def _without_long_integers(tensor: Any) -> tf.Tensor:
    """A tensor, whose integers of 64 bits become pairs of 32 bits."""
    return tf.bitcast(tensor, tf.int32) if tensor.dtype in _LONG else tensor


class _Rows:
    """The rows of a batch, of which each replica has a part, in order; an empty one has a filler.

    A gathered tensor is the sum of the replicas' parts, each in its place: collectives that gather need equal sizes.
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
        places = [place for place, leaf in enumerate(leaves) if leaf is not None]
        sums = sum_over_replicas([self._in_place(_without_long_integers(leaves[place])) for place in places])
        for place, total in zip(places, sums, strict=True):
            dtype = leaves[place].dtype
            total = tf.bitcast(total, dtype) if dtype in _LONG else tf.cast(total, dtype)
            total.set_shape([None, *leaves[place].shape[1:]])
            leaves[place] = total
        return keras.tree.pack_sequence_as(nested, leaves)

    def _in_place(self, tensor: Any) -> tf.Tensor:
        tensor = tf.cast(tensor, "int32") if tensor.dtype.is_bool else tensor
        after = self.total - self.first - self.batch.rows
        paddings = tf.concat([[[self.first, after]], tf.zeros([tensor.shape.rank - 1, 2], "int32")], 0)
        rows: Any = self.batch.drop_filler(tensor)
        return tf.pad(rows, paddings)

    def of_replica(self, tensor: GradientTensor | None) -> tf.Tensor | None:
        """This replica's rows of a gathered tensor, with zeros for a filler."""
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
    """A loss of outputs, and its gradient.

    Attributes:
        loss: The loss of the batch.
        cotangents: The gradient with respect to each of this replica's tensors, or `None`.
        gradients: This replica's share of the gradient with respect to each trainable weight that isn't through the
            outputs: of regularizers, and of weights that `compute_loss` reads; or `None`.
        sums: This replica's share of the losses to log, or `None` on one.
        batch: The arguments of `compute_loss`, with this replica's rows.
    """

    loss: tf.Tensor
    cotangents: list[tf.Tensor | None]
    gradients: list[Any]
    sums: LossSums | None
    batch: LossArguments


def whole_loss(context: StepContext, data: Batch, tensors: Sequence[tf.Tensor], form: OutputForm) -> WholeLoss:
    """Computes the loss of a batch as Keras does, and its gradient with respect to the outputs.

    Args:
        context: The context of the step.
        data: The batch, on this replica.
        tensors: The results of `forward`, on this replica.
        form: How they make up the outputs.
    """
    model, rows = context.model, _Rows(context.replica_batch)
    whole = _gather(model, data, tensors, rows)
    places = [place for place, tensor in enumerate(whole.tensors) if has_gradient(tensor)]
    watched = [whole.tensors[place] for place in places]
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tape.watch(watched)
        loss, terms = whole.loss(model, form, training=True)
        scaled = model.optimizer.scale_loss(loss)
    found: Any = tape.gradient(scaled, [*watched, *(source(variable) for variable in model.trainable_weights)])
    by_place = dict(zip(places, found, strict=False))
    cotangents = [by_place.get(place) for place in range(len(tensors))]
    # All replicas compute the same.
    share = tf.constant(1 / replica_count())
    gradients = [scale_gradient(each, share) for each in found[len(places) :]]
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    batch = {"x": x, "y": y, "y_pred": form.pack(tensors), "sample_weight": sample_weight}
    sums = _share_of_sums(model, loss, terms, rows) if context.sums else None
    return WholeLoss(loss, [rows.of_replica(each) for each in cotangents], gradients, sums, batch)


class _Whole(NamedTuple):
    """The tensors of all outputs of a batch, and the other arguments of `compute_loss`."""

    tensors: list[tf.Tensor]
    arguments: dict[str, Any]

    def loss(self, model: Any, form: OutputForm, *, training: bool) -> tuple[tf.Tensor, list[LossTerm]]:
        """The loss, and the terms of the compiled losses."""
        form.add_losses(model, self.tensors)
        untracked = replica_count() > 1
        with recorded_terms(model, untracked=untracked) as terms, without_replica_division():
            return model._compute_loss(**self.arguments, y_pred=form.pack(self.tensors), training=training), terms


def _gather(model: Any, data: Batch, tensors: Sequence[tf.Tensor], rows: _Rows) -> _Whole:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    # Keras's own `compute_loss` ignores the inputs, which may be large.
    inputs = x if overrides_compute_loss(model) else None
    gathered: Any = rows.gather({"outputs": list(tensors), "x": inputs, "y": y, "sample_weight": sample_weight})
    outputs = gathered.pop("outputs")
    return _Whole(outputs, {**gathered, "x": x} if inputs is None else gathered)


def _share_of_sums(model: Any, loss: tf.Tensor, terms: list[LossTerm], rows: _Rows) -> LossSums:
    """This replica's share of the losses of the whole batch, which every replica has computed."""
    sums = loss_sums(model, loss, terms, rows.total)
    return sums._replace(vector=sums.vector / replica_count())


def backward(model: Any, x: Structure, cotangents: Sequence[tf.Tensor | None]) -> list[Any]:
    """Calls a model on a part of a batch again, and returns the gradient of its weights.

    Args:
        model: A compiled model.
        x: The inputs of the part.
        cotangents: The gradient with respect to each tensor of `forward`, or `None`.
    """
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tensors, _ = forward(model, x)
    return _gradients(tape, tensors, [source(variable) for variable in model.trainable_weights], cotangents)


def _gradients(
    tape: tf.GradientTape, tensors: Sequence[tf.Tensor], weights: list[Any], cotangents: Sequence[tf.Tensor | None]
) -> list[Any]:
    pairs = [pair for pair in zip(tensors, cotangents, strict=True) if pair[1] is not None]
    if not pairs:
        return [None] * len(weights)
    targets, found = map(list, zip(*pairs, strict=True))
    with regather_in_backward(found[0]):
        gradients: Any = tape.gradient(targets, weights, output_gradients=found)
    return gradients


def gradient_of_replica(context: StepContext, data: Batch) -> Gradient:
    """The gradient of a replica batch whose loss compares examples with those of other replicas."""
    model = context.model
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    forms: list[OutputForm] = []

    def run(x: Structure) -> list[tf.Tensor]:
        tensors, form = forward(model, x)
        forms.append(form)
        return tensors

    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        # XLA can't compile the collectives after it.
        tensors = call_in_function(run, x) if context.by_xla else run(x)
    whole = whole_loss(context, data, tensors, forms[-1])
    weights = [source(variable) for variable in model.trainable_weights]
    found = context.replica_batch.gradients(_gradients(tape, tensors, weights, whole.cotangents))
    return gradient_of_batch(context, data, list(map(add_gradients, found, whole.gradients)), whole)


def gradient_of_batch(context: StepContext, data: Batch, gradients: Gradients, whole: WholeLoss) -> Gradient:
    """The gradient of a batch, whose sum over the replicas is the whole one.

    On one device, loss and metrics are tracked as Keras does; on several, this updates the metrics.
    """
    model, batch = context.model, whole.batch
    if whole.sums is None:
        show = functools.partial(track_batch, model, whole.loss, batch)
        return Gradient(list(gradients), whole.loss, rows_of(batch["x"]), None, None, show)
    context.replica_batch.run(lambda: update_metrics(model, batch))
    check_metrics(model, batch["y"], batch["y_pred"], batch["sample_weight"])
    weight = Normalizer(tf.constant(1.0), summed=True)
    return Gradient(list(gradients), whole.loss, rows_of(batch["x"]), weight, whole.sums)


def evaluate_whole(model: Any, data: Batch, batch: ReplicaBatch) -> tuple[Structure, LossSums]:
    """The outputs of a replica batch, and its share of a loss that compares examples with those of other replicas."""
    rows = _Rows(batch)
    tensors, form = forward(model, keras.utils.unpack_x_y_sample_weight(data)[0], training=False)
    loss, terms = _gather(model, data, tensors, rows).loss(model, form, training=False)
    return form.pack(tensors), _share_of_sums(model, loss, terms, rows)
