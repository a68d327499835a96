"""Refuses models in which examples of a batch depend on each other, or warns of them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.state import state_of
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.losses import mixes_rows, parts_make_up_the_whole
from keras_paragrad.engine.probes.rows import mixing_layer
from keras_paragrad.engine.probes.states import layers_apart, metrics_apart, own_metrics_apart
from keras_paragrad.engine.step.forward import Normalizer

# What the parts of a batch are called, by the component that splits it.
_PARTS = {
    "AccumulatingOptimizer": "micro-batches",
    "DistributedFit": "the replicas' parts of a batch",
    "Pipeline": "the micro-batches of a pipeline",
    "microbatch": "the slices of a batch",
    "make_private": "the physical batches of an update",
}


class _Found(NamedTuple):
    """What was found: what makes the result wrong, and what makes it inexact."""

    wrong: list[str]
    inexact: list[str]


def independence_refusal(
    model: keras.Model,
    arguments: dict[str, Any],
    terms: list[LossTerm],
    *,
    asked_by: str,
    training: bool = True,
    normalize: Callable[[dict[str, Any]], Normalizer] | None = None,
) -> str | None:
    """Why parts of a batch can't make up the whole, as its outputs or loss mix examples; tried once for each `compile`.

    Args:
        model: A built and compiled model.
        arguments: Those its `compute_loss` was called with, of which only shapes and dtypes count.
        terms: The terms of the compiled loss.
        asked_by: The component that splits batches.
        training: Whether the batch is trained on; else it is evaluated.
        normalize: What the user says that the loss is divided by. Then the reasons are only warned of.

    Returns:
        The reasons, or `None` if there is none.
    """
    key = (asked_by, training, normalize is None)
    found = _known(key, model, arguments, lambda: _found(model, arguments, terms, asked_by, training, normalize))
    if found.wrong and normalize is None:
        return " ".join(found.wrong)
    _warn([*found.wrong, *found.inexact])
    return None


def check_metrics(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Refuses metrics that cannot be combined over replicas, and warns of those that depend on how batches are split.

    Args:
        model: A built and compiled model, whose metrics have been called.
        y, y_pred, sample_weight: What they were given, of which only shapes and dtypes count.

    Raises:
        ValueError: On several replicas, a metric shows something else than on one device.
    """
    arguments = {"y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    found = _known(("metrics",), model, arguments, lambda: _of_metrics(model, arguments))
    if found.wrong:
        raise ValueError(" ".join(found.wrong))
    _warn(found.inexact)


def _known(key: tuple, model: Any, arguments: dict[str, Any], find: Callable[[], _Found]) -> _Found:
    """What `find` gives, now or when it was asked before of this model as it is compiled."""
    key = (*key, replica_count() > 1, *map(_kind, keras.tree.flatten(arguments)))
    configuration = model._compile_config
    state = state_of(model)
    if state.independence is None or state.independence[0] is not configuration:
        state.independence = (configuration, {})
    known = state.independence[1]
    if key not in known:
        known[key] = find()
    return known[key]


def _kind(tensor: Any) -> Any:
    return (tensor.dtype, *tensor.shape[1:]) if tf.is_tensor(tensor) and tensor.shape.rank else None


def _warn(problems: list[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=2)


def _found(
    model: Any,
    arguments: dict[str, Any],
    terms: list[LossTerm],
    asked_by: str,
    training: bool,
    normalize: Callable | None,
) -> _Found:
    parts = _PARTS[asked_by]
    wrong = list(_mixing(model, arguments, terms, parts, training))
    inexact = []
    names = own_metrics_apart(model, arguments, beside=replica_count() > 1, training=training)
    if names:
        inexact.append(
            f"The metrics {', '.join(names)}, which call() or compute_loss() updates, take one number for each of "
            f"{parts}, so their results differ from those of the whole batch. Update them with one value per example."
        )
    if not training:
        return _Found(wrong, inexact)
    if not wrong and normalize and not parts_make_up_the_whole(model, arguments, normalize):
        wrong.append(
            f"The losses of {parts}, weighted by `weighting`, do not sum to the loss of the whole batch: that has "
            "another normalizer, or is not a sum over the examples."
        )
    names = layers_apart(model, arguments["x"], beside=replica_count() > 1)
    if names:
        inexact.append(
            f"The state of {', '.join(names)} is updated with each of {parts}, which gives another state than one "
            "update with the whole batch."
        )
    return _Found(wrong, inexact)


def _mixing(model: Any, arguments: dict[str, Any], terms: list[LossTerm], parts: str, training: bool) -> Iterator[str]:
    layer = mixing_layer(model, arguments["x"], training=training)
    if layer:
        yield (
            f"The output of {layer!r} for one example depends on the others in the batch, so {parts} can't be "
            "combined into the whole."
        )
    names = dict.fromkeys(term.loss.name for term in terms if not term.reduces_itself and mixes_rows(term))
    for name in names:
        yield (
            f"The loss {name!r} compares examples: its value for one depends on the others in the batch, or on how "
            f"many there are, so {parts} can't be combined into the whole."
        )


def _of_metrics(model: Any, arguments: dict[str, Any]) -> _Found:
    beside = replica_count() > 1
    even, uneven = metrics_apart(model, **arguments, beside=beside)
    wrong, inexact = [], []
    if even:
        wrong.append(
            f"The results of the metrics {', '.join(even)} differ when a batch is split into parts. Let each metric "
            "accumulate sums over examples, with add_variable(..., aggregation='sum') and assign_add, or use a "
            "function that returns one value per example."
        )
    if uneven:
        inexact.append(
            f"The results of the metrics {', '.join(uneven)} differ when a batch is split into parts of different "
            "sizes: they average one number per batch. Use a function that returns one value per example."
        )
    if beside and wrong:
        return _Found([f"{wrong[0]} To train anyway, write DistributedFit(..., exact=False)."], inexact)
    return _Found([], wrong + inexact)
