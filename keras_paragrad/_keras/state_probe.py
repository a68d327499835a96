"""Whether the states of metrics and layers are the same for a batch and for its parts, found by trying."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad._keras.made_up import SIZES, attempt, called, made_up, some_rows, value_of, without_trace
from keras_paragrad._keras.model import all_layers

ROWS = 8
# The second split has parts of unequal size, as the last batch of an epoch may have.
_EVEN, _UNEVEN = 4, 6

State = dict[int, np.ndarray]


def metrics_apart(model: Any, y: Any, y_pred: Any, sample_weight: Any, *, beside: bool) -> tuple[list[str], list[str]]:
    """The metrics that show something else for a batch in two parts than for the whole batch.

    Args:
        model: A built and compiled model.
        y, y_pred, sample_weight: What its metrics are given, of which only shapes and dtypes count.
        beside: Whether the parts are on two replicas, whose states are added up; else one follows the other.

    Returns:
        The names of those that do for parts of one size, and of those that do only for parts of unequal sizes. Both
        are empty where the metrics could not be called on made-up rows.
    """
    metrics = model._compile_metrics
    if not model.metrics_variables or (metrics is not None and not metrics.built):
        return [], []
    with tf.init_scope():
        for size in SIZES:
            with attempt("a metric"):
                targets = made_up(y, ROWS, seed=0, size=size, labels=True)
                batch = (targets, *made_up((y_pred, sample_weight), ROWS, seed=1, size=size))
                whole = _results(model, _after(model, batch))
                even, uneven = (_differing(model, batch, whole, rows, beside) for rows in (_EVEN, _UNEVEN))
                return even, [name for name in uneven if name not in even]
    return [], []


def layers_apart(model: Any, x: Any, *, beside: bool) -> list[str]:
    """The layers with a state that a batch in two parts leaves otherwise than the whole batch does.

    Batch normalization is not among them, nor are seeds.

    Args:
        model: A built model.
        x: Its inputs, of which only shapes and dtypes count.
        beside: Whether the parts are on two replicas; else one follows the other.
    """
    owners = _owners(model)
    with tf.init_scope():
        for size in SIZES:
            with attempt("a layer's state"):
                batch = made_up(x, ROWS, seed=0, size=size)
                start = {id(variable): value_of(variable) for variable, _ in owners}
                whole = _trained(model, owners, batch, start)
                changed = [pair for pair in owners if not np.array_equal(whole[id(pair[0])], start[id(pair[0])])]
                if not changed:
                    return []
                first, second = some_rows(batch, 0, _EVEN), some_rows(batch, _EVEN, ROWS)
                one = _trained(model, owners, first, start)
                two = _trained(model, owners, second, start if beside else one)
                found = (
                    name
                    for variable, name in changed
                    if not _close(whole[id(variable)], _joined(variable, one, two) if beside else two[id(variable)])
                )
                return list(dict.fromkeys(found))
    return []


def _differing(model: Any, batch: Any, whole: dict[str, Any], rows: int, beside: bool) -> list[str]:
    first, second = some_rows(batch, 0, rows), some_rows(batch, rows, ROWS)
    one = _after(model, first)
    two = _after(model, second, None if beside else one)
    state = {id(v): _joined(v, one, two) for v in model.metrics_variables} if beside else two
    found = _results(model, state)
    return [name for name in whole if not _close(whole[name], found[name])]


def _after(model: Any, batch: Any, state: State | None = None) -> State:
    """The metrics' states after a batch, from the given states or from none."""
    y, y_pred, sample_weight = batch
    variables = model.metrics_variables
    with without_trace(model, _pairs(variables, state)):
        if state is None:
            model.reset_metrics()
        model.compute_metrics(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return {id(variable): value_of(variable) for variable in variables}


def _results(model: Any, state: State) -> dict[str, Any]:
    with without_trace(model, _pairs(model.metrics_variables, state)):
        results = model.get_metrics_result()
        return {name: tf.convert_to_tensor(value).numpy() for name, value in results.items()}


def _trained(model: Any, owners: list[tuple[keras.Variable, str]], x: Any, state: State) -> State:
    with without_trace(model, _pairs([variable for variable, _ in owners], state)):
        called(model, (x,), training=True)
        return {id(variable): value_of(variable) for variable, _ in owners}


def _pairs(variables: list[keras.Variable], state: State | None) -> list[tuple[keras.Variable, np.ndarray]]:
    return [(variable, state[id(variable)]) for variable in variables] if state else []


def _owners(model: Any) -> list[tuple[keras.Variable, str]]:
    """The variables that layers may change in training, with the names of the layers."""
    layers = [layer for layer in (model, *all_layers(model)) if not isinstance(layer, keras.layers.BatchNormalization)]
    return [(variable, layer.name) for layer in layers for variable in layer._non_trainable_variables]


def _joined(variable: keras.Variable, one: State, two: State) -> np.ndarray:
    """What the states of two replicas become."""
    first, second = one[id(variable)], two[id(variable)]
    if variable.aggregation == "sum":
        return first + second
    return (first + second) / 2 if variable.aggregation == "mean" else first


def _close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
