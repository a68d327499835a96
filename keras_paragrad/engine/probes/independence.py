"""Refuses models whose parts of a batch can't be combined into the whole batch, or warns of them.

A *part* of a batch is a replica's share of it, a slice, or a micro-batch of an accumulated window.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.state import Slot, warn_once
from keras_paragrad.compat.types import LossArguments, Structure
from keras_paragrad.engine.division.dividers import Divider
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.losses import find_mixing
from keras_paragrad.engine.probes.row_independence import find_mixing_layer
from keras_paragrad.engine.probes.states import (
    BatchSplit,
    layers_dependent_on,
    split_dependent_call_metrics,
    split_dependent_layers,
    split_dependent_metrics,
)
from keras_paragrad.engine.probes.trial import row_count, run_trial, take_rows

Result = TypeVar("Result")
# Advice on metrics that depend on how a batch is split.
USE_SUMS = (
    "Let each metric accumulate sums over examples, with add_variable(..., aggregation='sum') and assign_add, or use a "
    "function that returns one value per example."
)
# The `compile` for which results of probes are valid, and the results by key; see `once_per_compile`.
RESULTS = Slot[tuple[Any, dict[Any, Any]] | None]("probes", None, kept=True)
TRAIN_ANYWAY = "To train anyway, write DistributedFit(..., exact=False)."


class _Problems(NamedTuple):
    """Messages about problems that make results wrong, to refuse, and that make them inexact, to warn of."""

    wrong: list[str]
    inexact: list[str]


def mixing_reasons(
    model: keras.Model,
    arguments: LossArguments,
    terms: list[LossTerm],
    divider: Divider,
    *,
    training: bool = True,
    refused: bool = True,
) -> str | None:
    """Lists the reasons why parts of a batch can't be combined into the whole; tries once for each `compile`.

    Returns them as sentences, or `None`. Warns of the reasons, unless `refused`: then the caller raises them.
    """
    key = (divider, training)
    problems = once_per_compile(key, model, arguments, lambda: _find_problems(model, arguments, terms, *key))
    if not (problems.wrong and refused):
        _warn(model, [*problems.wrong, *problems.inexact])
    return " ".join(problems.wrong) or None


def check_metrics(
    model: keras.Model, batch: LossArguments, *, summed: bool = False, anyway: str = TRAIN_ANYWAY
) -> None:
    """Refuses metrics whose results change with the division into parts, if states are summed; otherwise warns.

    States are summed on several replicas, and always if `summed`. `anyway` is the advice to train anyway.
    """
    arguments = {name: batch[name] for name in ("y", "y_pred", "sample_weight")}
    summed = summed or replica_count() > 1
    problems = once_per_compile(
        ("metrics", summed), model, arguments, lambda: _metric_problems(model, arguments, summed=summed)
    )
    if problems.wrong:
        raise ValueError(" ".join([*problems.wrong, anyway]))
    _warn(model, problems.inexact)


def once_per_compile(
    key: tuple[object, ...],
    model: keras.Model,
    arguments: LossArguments,
    find: Callable[[], Result],
    *,
    by_replicas: bool = True,
) -> Result:
    """The result of `find`, cached by `key` for each `compile` and each signature of the arguments.

    If `by_replicas`, one replica and several replicas have separate results.
    """
    key = (*key, by_replicas and replica_count() > 1, *map(_signature, keras.tree.flatten(arguments)))
    configuration = model._compile_config
    results = RESULTS.of(model)
    if results is None or results[0] is not configuration:
        results = (configuration, {})
        RESULTS.attach(model, results)
    cache = results[1]
    if key not in cache:
        cache[key] = find()
    return cache[key]


def _signature(tensor: Any) -> object:
    """What a trial may depend on: the dtype, and the sizes of a row."""
    return (tensor.dtype, *tensor.shape[1:]) if tf.is_tensor(tensor) and tensor.shape.rank else None


def _warn(model: keras.Model, problems: list[str]) -> None:
    for problem in problems:
        warn_once(model, problem)


def _find_problems(
    model: keras.Model,
    arguments: LossArguments,
    terms: list[LossTerm],
    divider: Divider,
    training: bool,
) -> _Problems:
    """Compares parts of a batch with the whole batch in trials, and describes wrong or inexact results."""
    wrong = list(_mixing_problems(model, arguments, terms, divider, training))
    inexact = []
    on_replicas = replica_count() > 1
    names = split_dependent_call_metrics(model, arguments, on_replicas=on_replicas, training=training)
    if names:
        inexact.append(
            f"The metrics {', '.join(names)}, which call() or compute_loss() updates, take one number for each of "
            f"{divider.parts}, so their results differ from the whole batch's. Update them with one value per "
            "example."
        )
    if not training:
        return _Problems(wrong, inexact)
    if message := state_problem(model, arguments["x"], divider):
        # See `Divider.takes_weighting`.
        (wrong if divider.takes_weighting else inexact).append(message)
    return _Problems(wrong, inexact)


def state_problem(model: keras.Model, x: Structure, divider: Divider) -> str | None:
    """The error for layer states that depend on the division of a batch, or `None`."""
    names = split_dependent_layers(model, x, on_replicas=replica_count() > 1, in_sequence=divider.in_sequence)
    return states_refusal(names, divider) if names else None


def find_layers_dependent_on(model: keras.Model, x: Structure, most_rows: int, divider: Divider) -> list[str]:
    """Finds layers whose states after the rows of `x` depend on the split; uses at most the first `most_rows`."""
    rows = min(row_count(x), most_rows)
    # Different sizes make the parts distinguishable.
    split = BatchSplit(model.distribute_strategy.num_replicas_in_sync > 1, divider.in_sequence, rows, rows // 2 + 1)

    def find(count: int) -> list[str]:
        return layers_dependent_on(model, [take_rows(x, 0, count)], split)

    return run_trial(find, rows, otherwise=[], question=None) if rows > 2 else []


def states_refusal(names: Sequence[str], divider: Divider) -> str:
    """The error for states that differ after parts of a batch, or that later parts read."""
    return (
        f"The state of {', '.join(names)} is updated with each of {divider.parts}, so it ends up different from one "
        "update with the whole batch, or later parts read a changed state. Update it once per batch, in "
        f"on_train_batch_end of a callback. {divider.whole_batches}"
    )


def _mixing_problems(
    model: keras.Model, arguments: LossArguments, terms: list[LossTerm], divider: Divider, training: bool
) -> Iterator[str]:
    """Messages about layers and losses that mix examples."""
    layer = find_mixing_layer(model, arguments["x"], training=training)
    if layer:
        yield (
            f"The output of {layer!r} for one example depends on the others in the batch, so {divider.parts} can't be "
            "combined into the whole."
        )

    # A loss that reduces itself has no value for each example to compare.
    comparable = [term for term in terms if not term.reduces_itself]
    # Training and evaluation share this answer.
    mixing = once_per_compile(
        ("mixing losses",),
        model,
        arguments,
        lambda: [(term.loss.name, what) for term in comparable if (what := find_mixing(term))],
    )
    for name, what in dict.fromkeys(mixing):
        instead = f" {divider.for_comparing_losses}" if divider.for_comparing_losses else ""
        yield f"The loss {name!r} {what}, so {divider.parts} can't be combined into the whole.{instead}"


def _metric_problems(model: keras.Model, arguments: LossArguments, *, summed: bool) -> _Problems:
    """Messages about metrics that depend on how a batch is split; without summed states, none makes results wrong."""
    even, uneven = split_dependent_metrics(model, **arguments, on_replicas=summed)
    wrong, inexact = [], []
    if even:
        wrong.append(
            f"The results of the metrics {', '.join(even)} differ when a batch is split into parts. {USE_SUMS}"
        )
    if uneven:
        inexact.append(
            f"The results of the metrics {', '.join(uneven)} differ when a batch is split into parts of different "
            "sizes: they average one number per batch. Use a function that returns one value per example."
        )
    if summed and wrong:
        return _Problems(wrong, inexact)
    return _Problems([], wrong + inexact)
