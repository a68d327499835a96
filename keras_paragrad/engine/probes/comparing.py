"""Finds, by trials on synthetic rows, whether a model's loss compares examples while its layers don't.

Such a loss is computed on the outputs of the whole batch, joined from the outputs of its *parts*: replicas' shares, or
slices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.collectives import as_one_replica
from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import added_losses, all_layers, overrides_compute_loss, overrides_train_step
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import Batch, LossArguments, Structure
from keras_paragrad.engine.division.dividers import Divider
from keras_paragrad.engine.losses.loss_normalization import LossNormalization, find_weightings
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import LossTerm, arguments_of, compute_loss
from keras_paragrad.engine.probes.independence import RESULTS, once_per_compile, state_problem
from keras_paragrad.engine.probes.losses import loss_mixes_rows
from keras_paragrad.engine.probes.pure_function import PureFunction
from keras_paragrad.engine.probes.row_independence import find_mixing_layer, has_losses_per_example
from keras_paragrad.engine.probes.trial import SIZES, run_trial, synthetic_rows

_ROWS = 8


def needs_whole_outputs(model: Any, data: Batch, normalize: LossNormalization, *, training: bool = True) -> bool:
    """Whether the loss must be computed on a whole batch's outputs; raises `IndivisibleError` if it can't be."""
    answer = find_row_comparison(model, data, normalize, training=training)
    if isinstance(answer, str):
        raise IndivisibleError(answer)
    return answer


def find_row_comparison(model: Any, data: Batch, normalize: LossNormalization, *, training: bool = True) -> bool | str:
    """Whether the loss compares examples, and so needs a whole batch's outputs; a string if it can't have them."""
    # A stated weighting is taken at its word.
    if normalize.weighting != "auto" or not normalize.divider.on_whole_batches or overrides_train_step(model):
        return False
    if not _is_required(model) and not overrides_compute_loss(model) and has_losses_per_example(model):
        return False
    arguments = arguments_of(data)
    key = ("compares", normalize.divider, training, _is_required(model))
    return once_per_compile(key, model, arguments, lambda: _run_trials(model, arguments, normalize.divider, training))


class _Traced(NamedTuple):
    """A loss traced on synthetic rows: its arguments and terms, and why outputs of parts can't be joined, or `None`."""

    arguments: LossArguments
    terms: list[LossTerm]
    refusal: str | None


def _run_trials(model: Any, arguments: LossArguments, divider: Divider, training: bool) -> bool | str:
    """Whether the loss compares examples; the error if it does, and parts' outputs don't give the whole batch's."""
    # Training and evaluation share this answer.
    key = ("comparison", _is_required(model))
    comparison = once_per_compile(key, model, arguments, lambda: _try_comparison(model, arguments))
    if not comparison:
        return False
    if layer := _mixing_layer(model, arguments["x"], divider, training):
        return layer
    if isinstance(comparison, str):
        return comparison
    if training and (problem := state_problem(model, arguments["x"], divider)):
        return problem
    if training:
        log_once(
            model,
            f"The loss of {model.name!r} compares the examples of a batch, or divides by a custom quantity, so it "
            f"is computed on the outputs of whole batches; {divider.on_whole_batches}.",
        )
    return True


def require_whole_losses(model: Any) -> None:
    """Makes steps compute the loss on the outputs of whole batches until the next `compile`."""
    once_per_compile(("whole losses",), model, {}, lambda: True, by_replicas=False)


def _is_required(model: Any) -> bool:
    """Whether `require_whole_losses` was called since the last `compile`; looks up the key that it caches."""
    results = RESULTS.of(model)
    return results is not None and results[0] is model._compile_config and ("whole losses", False) in results[1]


def _try_comparison(model: Any, arguments: LossArguments) -> bool | str:
    """Whether the loss compares examples, or the reason why outputs of parts can't be joined for it."""
    # A failed trial isn't logged: a later refusal gives the reason.
    traced = run_trial(lambda size: _trace(model, arguments, size), *SIZES, otherwise=None, question=None)
    return traced is not None and _loss_compares_rows(model, traced) and (traced.refusal or True)


def _loss_compares_rows(model: Any, traced: _Traced) -> bool:
    """Whether the traced loss depends on more than one row at a time, or has to be treated as if it did."""
    if _is_required(model):
        return True
    # A loss that returns one number has no values to compare, and a custom `compute_loss` may do anything.
    unknown = [term for term in traced.terms if term.reduces_itself or term.values.shape.rank == 0]
    if any(loss_mixes_rows(term) for term in traced.terms if term not in unknown):
        return True
    if not unknown and not overrides_compute_loss(model):
        return False
    trial = find_weightings(model, traced.arguments)
    # `None`: the trial failed on synthetic rows and shows nothing; a later refusal says more.
    return trial is not None and not trial.fitting


def _trace(model: Any, arguments: LossArguments, size: int) -> _Traced:
    """Traces the loss on synthetic rows, whose axes of unknown size get `size`."""
    inputs = synthetic_rows((arguments["x"], arguments["sample_weight"]), _ROWS, seed=1, size=size)
    targets = synthetic_rows(arguments["y"], _ROWS, seed=0, size=size, labels=True)
    results: list[_Traced] = []

    def compute(data: Any) -> Any:
        (x, sample_weight), y = data
        y_pred = call_model(model, x, training=True)
        refusal = _refuse_outputs(y_pred, added_losses(model))
        with as_one_replica():
            loss, _, terms = compute_loss(model, (x, y, sample_weight), y_pred=y_pred)
        # Compute and cache the values in this graph: their ranks are read later.
        for term in terms:
            if not term.reduces_itself:
                _ = term.values
        results.append(_Traced({**arguments, "y_pred": y_pred}, terms, refusal))
        return loss

    PureFunction(model, compute).graph((inputs, targets))
    return results[-1]


def _refuse_outputs(y_pred: Structure, added: Sequence[Any]) -> str | None:
    """The reason why outputs or added losses of parts of a batch can't be joined, or `None`."""
    for path, leaf in keras.tree.flatten_with_path(y_pred):
        shape = getattr(leaf, "shape", None)
        if shape is None or not shape.rank or shape[0] != _ROWS:
            name = "".join(f"[{key!r}]" for key in path)
            return (
                f"The loss compares examples, and the model's output{name and ' '}{name} has the shape {shape} for "
                f"{_ROWS} examples, so the outputs of parts of a batch can't be put together. Return one row for each "
                "example: join the views of an example along another axis, or return them as several outputs."
            )
    if any(loss.shape.rank == 0 or loss.shape[0] != _ROWS for loss in added):
        return (
            "The loss compares examples, and a layer adds a loss with add_loss() or an activity regularizer, which may "
            "be a sum or a mean over them. Let add_loss() take one value per example, whose sum Keras takes, or "
            "compute it in the loss."
        )
    return None


def _mixing_layer(model: Any, x: Structure, divider: Divider, training: bool) -> str | None:
    """The error for a layer that mixes examples, or `None`."""
    # `find_mixing_layer` has these use their moving statistics.
    norms = [
        layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    synchronized = not training or (not divider.in_sequence and all(norm.synchronized for norm in norms))
    layer = norms[0].name if norms and not synchronized else find_mixing_layer(model, x, training=training)
    if layer is None:
        return None
    synchronize = "Write BatchNormalization(synchronized=True). " if norms and not divider.in_sequence else ""
    return (
        f"The loss compares examples, and {layer!r} mixes them as well: its output for one example depends on the "
        f"others in the batch, so the outputs of {divider.parts} differ from the whole batch's. "
        f"{synchronize}{divider.whole_batches}"
    )
