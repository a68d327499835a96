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

from keras_paragrad.compat.layers import has_gradient, mask_of, with_mask
from keras_paragrad.compat.model import added_losses_by_layer, replace_added_losses
from keras_paragrad.compat.types import Batch, Gradients, LossArguments, Structure
from keras_paragrad.engine.probes.untouched import never_run, untouched
from keras_paragrad.engine.replicas.replica_batch import rows_of
from keras_paragrad.engine.step.gradient import Gradient, StepContext, track_batch
from keras_paragrad.engine.step.operations import check_runs_twice
from keras_paragrad.storage.gathering import watch_gathered

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


def forward(model: Any, x: Structure) -> tuple[list[tf.Tensor], OutputForm]:
    """Calls a model in training; returns tensors that have a row for each example."""
    y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
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


class WholeLoss(NamedTuple):
    """A loss of outputs, and its gradient.

    Attributes:
        loss: The loss of the batch.
        cotangents: The gradient with respect to each tensor, or `None`.
        gradients: The gradient with respect to each trainable weight that isn't through the outputs: of regularizers,
            and of weights that `compute_loss` reads; or `None`.
        batch: The arguments of `compute_loss`.
    """

    loss: tf.Tensor
    cotangents: list[tf.Tensor | None]
    gradients: list[Any]
    batch: LossArguments


def whole_loss(model: Any, data: Batch, tensors: Sequence[tf.Tensor], form: OutputForm) -> WholeLoss:
    """Computes the loss of a batch as Keras does, and its gradient with respect to the outputs.

    Args:
        model: A compiled model.
        data: The batch.
        tensors: The results of `forward`, with the rows of the whole batch.
        form: How they make up the outputs.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    places = [place for place, tensor in enumerate(tensors) if has_gradient(tensor)]
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tape.watch([tensors[place] for place in places])
        form.add_losses(model, tensors)
        batch = {"x": x, "y": y, "y_pred": form.pack(tensors), "sample_weight": sample_weight}
        loss = model._compute_loss(**batch, training=True)
        scaled = model.optimizer.scale_loss(loss)
    weights = [source(variable) for variable in model.trainable_weights]
    found: Any = tape.gradient(scaled, [*(tensors[place] for place in places), *weights])
    by_place = dict(zip(places, found, strict=False))
    cotangents = [by_place.get(place) for place in range(len(tensors))]
    dense = [None if each is None else tf.convert_to_tensor(each) for each in cotangents]
    return WholeLoss(loss, dense, found[len(places) :], batch)


def backward(model: Any, x: Structure, cotangents: Sequence[tf.Tensor | None]) -> list[Any]:
    """Calls a model on a part of a batch again, and returns the gradient of its weights.

    Args:
        model: A compiled model.
        x: The inputs of the part.
        cotangents: The gradient with respect to each tensor of `forward`, or `None`.
    """
    with tf.GradientTape() as tape, watch_gathered(tape) as source:
        tensors, _ = forward(model, x)
    pairs = [pair for pair in zip(tensors, cotangents, strict=True) if pair[1] is not None]
    weights = [source(variable) for variable in model.trainable_weights]
    if not pairs:
        return [None] * len(weights)
    targets, found = map(list, zip(*pairs, strict=True))
    gradients: Any = tape.gradient(targets, weights, output_gradients=found)
    return gradients


def gradient_of_batch(context: StepContext, data: Batch, gradients: Gradients, whole: WholeLoss) -> Gradient:
    """The gradient of a batch on one device, for which loss and metrics are tracked as Keras does."""
    show = functools.partial(track_batch, context.model, whole.loss, whole.batch)
    return Gradient(gradients, whole.loss, rows_of(data), None, None, show)
