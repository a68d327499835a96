"""Finds, before the step is traced, whether the losses of slices can be combined for any number of rows in a batch."""

import keras

from keras_paragrad.compat.collectives import as_one_replica
from keras_paragrad.compat.model import all_variables
from keras_paragrad.compat.types import Batch, LossArguments
from keras_paragrad.engine.division.proof import is_known_to_divide
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import MEANS, LossTerm, arguments_of, compute_loss
from keras_paragrad.engine.probes.independence import once_per_compile
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.step.indivisible import explaining_rows
from keras_paragrad.engine.step.stages import Split
from keras_paragrad.engine.tracing.untouched import trace_rows
from keras_paragrad.storage.gathering import zeros_in_place_of_shards


def trace_loss(model: keras.Model, data: Batch) -> tuple[LossArguments, list[LossTerm]]:
    """Traces the loss of a batch into a graph that never runs; returns its arguments and terms."""
    # No other replica runs this trace, so weights can't be gathered.
    with zeros_in_place_of_shards(all_variables(model)), as_one_replica():
        _, arguments, terms = compute_loss(model, data)
    return arguments, terms


def find_refusal_of_slices(model: keras.Model, split: Split, data: Batch) -> str | None:
    """The reason why slices of a batch can't be combined, or `None`; from a trace of it that never runs."""

    def trace(data: Batch) -> None:
        split.normalize(model, *trace_loss(model, data))

    def find() -> str | None:
        build_losses(model, data)
        # One loss that is a mean over rows, in a model of Keras's own layers, needs no trace.
        losses = model._compile_loss._flat_losses if model._compile_loss else ()
        if len(losses) == 1 and losses[0].loss.reduction in MEANS and is_known_to_divide(model):
            return None
        try:
            with explaining_rows(model, data, parts=1, trace=trace):
                # As many rows as a slice has. Of a pipeline, `size` is 1: its micro-batches have any number of rows.
                trace_rows(model, trace, data, split.size if split.size > 1 else None)
        except IndivisibleError as refusal:
            return str(refusal)
        except Exception:
            # The trace of the step, which follows, fails too and says more.
            return None
        return None

    return once_per_compile(("slices", split.normalize), model, arguments_of(data), find)
