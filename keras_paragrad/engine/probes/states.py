"""Whether the states of metrics and layers are the same for a batch and for its parts, found by trying."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.method_patch import is_patched
from keras_paragrad.compat.model import all_layers, own_metrics
from keras_paragrad.engine.probes.built_in import computes_rows_apart, values_are_of_examples
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Pure,
    State,
    Unknown,
    attempt,
    called,
    made_up,
    some_rows,
    with_changed_rows,
)

ROWS = 8
# The second split has parts of unequal size, as the last batch of an epoch may have.
_EVEN, _UNEVEN = 4, 6


def metrics_apart(model: Any, y: Any, y_pred: Any, sample_weight: Any, *, beside: bool) -> tuple[list[str], list[str]]:
    """The metrics that show something else for a batch in two parts than for the whole batch.

    Args:
        model: A built and compiled model.
        y, y_pred, sample_weight: What its metrics are given, of which only shapes and dtypes count.
        beside: Whether the parts are on two replicas, whose states are summed; else they are sequential.

    Returns:
        The names of those that do for parts of one size, and of those that do only for parts of unequal sizes. Both
        are empty where the metrics could not be called on made-up rows.
    """

    def results(batch):
        if batch is not None:
            y, y_pred, sample_weight = batch
            model.compute_metrics(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return dict(model.get_metrics_result())

    def start(_):
        model.reset_metrics()

    def find(size):
        if all(map(values_are_of_examples, _leaves(model.metrics))):
            return nothing
        targets = made_up(y, ROWS, seed=0, size=size, labels=True)
        batch = (targets, *made_up((y_pred, sample_weight), ROWS, seed=1, size=size))
        compute = Pure(model, results)
        _, state = Pure(model, start)(None)
        (whole, _), (again, _) = compute(batch, state), compute(batch, compute.with_other_seeds(state))
        if not all(_close(whole[name], again[name]) for name in whole):
            raise Unknown("a metric is random")

        def differing(rows):
            found = _after_parts(compute, batch, rows, state, beside=beside)
            shown, _ = compute(None, found)
            return [name for name in whole if not _close(whole[name], shown[name])]

        even, uneven = differing(_EVEN), differing(_UNEVEN)
        return even, [name for name in uneven if name not in even]

    nothing: tuple[list[str], list[str]] = [], []
    return attempt(find, *SIZES, otherwise=nothing, question="whether metrics depend on how a batch is split")


def layers_apart(model: Any, x: Any, *, beside: bool) -> list[str]:
    """The layers with a state that a batch in two parts leaves otherwise than the whole batch does.

    Batch normalization is not among them, nor are seeds, nor states that random numbers take part in.

    Args:
        model: A built model.
        x: Its inputs, of which only shapes and dtypes count.
        beside: Whether the parts are on two replicas; else one follows the other.
    """

    def train(batch):
        called(model, (batch,), training=True)

    def find(size):
        layers = [each for each in (model, *all_layers(model)) if not isinstance(each, keras.layers.BatchNormalization)]
        owners = {id(variable): layer.name for layer in layers for variable in layer._non_trainable_variables}
        if not owners or computes_rows_apart(model):
            return []
        batch = made_up(x, ROWS, seed=0, size=size)
        compute = Pure(model, train)
        (_, whole), (_, reseeded) = compute(batch), compute(batch, compute.with_other_seeds())
        parts = _after_parts(compute, batch, _UNEVEN, compute.start, beside=beside)
        return list(
            dict.fromkeys(
                owners[id(variable)]
                for variable, *values in zip(compute.variables, compute.start, whole, reseeded, parts, strict=True)
                if id(variable) in owners and _is_otherwise(*values)
            )
        )

    return attempt(find, *SIZES, otherwise=[], question="whether states of layers depend on how a batch is split")


def layers_that_keep_examples(model: Any, *arguments: Any) -> list[str]:
    """The layers of which training changes a state that is no trainable weight, in a way that depends on the examples.

    Batch normalization is not among them, nor is a state that changes by itself, such as a seed or a count of calls.

    Args:
        model: A built layer or model.
        *arguments: What it is called with, of which only shapes and dtypes count.
    """

    def train(batch):
        called(model, batch, training=True)

    def find(size):
        layers = [each for each in (model, *all_layers(model)) if not isinstance(each, keras.layers.BatchNormalization)]
        owners = {id(variable): layer.name for layer in layers for variable in layer._non_trainable_variables}
        if not owners or computes_rows_apart(model):
            return []
        compute = Pure(model, train)
        # Of numbers that are far larger and smaller, so that a state is no extreme of both, and of other tokens.
        draws = (0, 0.1, 0.9), (1, -1e3, 1e3)
        batches = with_changed_rows(
            *(made_up(arguments, ROWS, seed=seed, size=size, low=low, high=high) for seed, low, high in draws),
            places=list(range(ROWS)),
        )
        (_, one), (_, other) = map(compute, batches)
        found = [
            owners[id(variable)]
            for variable, *values in zip(compute.variables, one, other, strict=True)
            if id(variable) in owners and not _close(*values)
        ]
        return list(dict.fromkeys(found))

    return attempt(find, *SIZES, otherwise=[], question="whether states of layers depend on the examples")


def own_metrics_apart(model: Any, arguments: dict[str, Any], *, beside: bool, training: bool) -> list[str]:
    """The metrics updated in `call` or `compute_loss` that show something else for a batch in two parts.

    Args:
        model: A built and compiled model.
        arguments: Those of its `compute_loss`, of which only shapes and dtypes count.
        beside: Whether the parts are on two replicas; else one follows the other.
        training: Whether the batch is trained on.
    """
    # In a step of the model's own, the numbers for the parts are put together.
    metrics = [metric for metric in own_metrics(model) if not is_patched(metric, "update_state")]

    def results(data):
        if data is not None:
            x, sample_weight, y = data
            given = {"x": x, "y": y, "y_pred": called(model, (x,), training), "sample_weight": sample_weight}
            model._compute_loss(**given, training=training)
        return [keras.tree.flatten(metric.result()) for metric in metrics]

    def find(size):
        if not metrics:
            return []
        inputs = made_up((arguments["x"], arguments["sample_weight"]), ROWS, seed=1, size=size)
        data = [*inputs, made_up(arguments["y"], ROWS, seed=0, size=size, labels=True)]
        compute = Pure(model, results)
        _, start = Pure(model, lambda _: model.reset_metrics())(None)
        (whole, _), (reseeded, _) = compute(data, start), compute(data, compute.with_other_seeds(start))
        parts, _ = compute(None, _after_parts(compute, data, _UNEVEN, start, beside=beside))
        return [
            metric.name
            for metric, *values in zip(metrics, whole, reseeded, parts, strict=True)
            if all(map(_close, values[0], values[1])) and not all(map(_close, values[0], values[2]))
        ]

    return attempt(
        find,
        *SIZES,
        otherwise=[],
        question="whether metrics of layers depend on how a batch is split",
    )


def _is_otherwise(start: Any, whole: Any, reseeded: Any, parts: Any) -> bool:
    return not _close(start, whole) and _close(whole, reseeded) and not _close(whole, parts)


def _after_parts(compute: Pure, batch: Any, rows: int, start: State, *, beside: bool) -> State:
    """The state after the first rows of a batch and the others."""
    _, one = compute(some_rows(batch, 0, rows), start)
    _, two = compute(some_rows(batch, rows, ROWS), start if beside else one)
    return [_joined(*each) for each in zip(compute.variables, one, two, strict=True)] if beside else two


def _joined(variable: keras.Variable, one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
    """What the states of two replicas become."""
    if variable.aggregation == "sum":
        return one + two
    return (one + two) / 2 if variable.aggregation == "mean" else one


def _leaves(metrics: list[Any]) -> list[Any]:
    return [leaf for metric in metrics for leaf in getattr(metric, "metrics", [metric])]


def _close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
