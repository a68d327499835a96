"""Finds, before the step is traced, whether the losses of slices can be combined for any number of rows in a batch."""

import contextlib

import keras

from keras_paragrad.compat.collectives import as_one_replica, replica_count
from keras_paragrad.compat.layers import attributes
from keras_paragrad.compat.model import all_layers, all_variables
from keras_paragrad.compat.types import Batch, LossArguments
from keras_paragrad.engine.division.proof import is_known_to_divide
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.terms import MEANS, LossTerm, arguments_of, compute_loss
from keras_paragrad.engine.probes.independence import once_per_compile
from keras_paragrad.engine.replicas.replica_batch import static_row_count
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.step.indivisible import explaining_rows
from keras_paragrad.engine.step.stages import Split
from keras_paragrad.engine.tracing.untouched import trace_rows
from keras_paragrad.storage.gathering import zeros_in_place_of_shards


def trace_loss(model: keras.Model, data: Batch, *, training: bool = True) -> tuple[LossArguments, list[LossTerm]]:
    """Traces the loss of a batch into a graph that never runs; returns its arguments and terms."""
    # No other replica runs this trace, so weights can't be gathered, nor statistics be synchronized.
    with zeros_in_place_of_shards(all_variables(model)), as_one_replica(), contextlib.ExitStack() as stack:
        for layer in layers_of_batch_statistics(model):
            stack.enter_context(attributes(layer, synchronized=False))
        _, arguments, terms = compute_loss(model, data, training=training)
    return arguments, terms


def find_refusal_of_loss(
    model: keras.Model,
    normalize: LossNormalization,
    split: Split | None,
    data: Batch,
    *,
    training: bool = True,
    read: bool = False,
) -> str | None:
    """The reason why losses of parts of a batch can't be combined, or `None`; from a trace of it that never runs.

    If `read`, what a part weighs has to be read off Keras's losses, or stated.
    """
    parts = replica_count()

    def trace(data: Batch) -> None:
        measure = normalize.in_evaluation
        if training:
            measure = normalize.check_read if read else normalize
        measure(model, *trace_loss(model, data, training=training))

    def find() -> str | None:
        build_losses(model, data)
        # One loss that is a mean over rows, in a model of Keras's own layers, needs no trace.
        # A `compute_loss` of the model's own may leave the compiled loss unbuilt.
        losses = (model._compile_loss and model._compile_loss._flat_losses) or ()
        adds = any(getattr(layer, "activity_regularizer", None) for layer in all_layers(model))
        if len(losses) == 1 and losses[0].loss.reduction in MEANS and not adds and is_known_to_divide(model):
            return None
        try:
            with explaining_rows(model, data, parts=parts, trace=trace):
                # As many rows as a slice has. Of a pipeline, `size` is 1: its micro-batches have any number of rows.
                trace_rows(model, trace, data, split.size if split and split.size > 1 else static_row_count(data))
        except IndivisibleError as refusal:
            return str(refusal)
        except Exception:
            # The trace of the step, which follows, fails too and says more.
            return None
        return None

    return once_per_compile(("loss", normalize, split and split.size, training, read), model, arguments_of(data), find)
