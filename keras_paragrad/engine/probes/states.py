"""Whether metrics and states of layers depend on how a batch is split, found by a trial on synthetic rows."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_layers, all_metrics
from keras_paragrad.compat.state import is_patched
from keras_paragrad.compat.types import Batch, LossArguments, Structure
from keras_paragrad.engine.probes.row_independence import computes_rows_independently, has_value_per_example
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    PureFunction,
    State,
    call_model,
    change_rows,
    run_trial,
    synthetic_rows,
    take_rows,
)

_ROWS = 8
# The size of the first part: of two equal ones, or of unequal ones, as the last batch of an epoch has.
_EVEN, _UNEVEN = 4, 6


def split_dependent_metrics(
    model: keras.Model, y: Structure, y_pred: Structure, sample_weight: Structure, *, on_replicas: bool
) -> tuple[list[str], list[str]]:
    """Finds the compiled metrics whose results change when a batch is split into two parts.

    On replicas, the states of the parts are summed; otherwise the parts are sequential. Returns the names of metrics
    that change for equal parts, and of those that change for unequal parts only. Both are empty if the metrics can't be
    called on synthetic rows.
    """

    def results(batch: Batch):
        if batch is not None:
            y, y_pred, sample_weight = batch
            model.compute_metrics(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return dict(model.get_metrics_result())

    def find(size: int):
        leaves = [leaf for metric in model.metrics for leaf in getattr(metric, "metrics", [metric])]
        if all(map(has_value_per_example, leaves)):
            return [], []
        targets = synthetic_rows(y, _ROWS, seed=0, size=size, labels=True)
        batch = (targets, *synthetic_rows((y_pred, sample_weight), _ROWS, seed=1, size=size))
        compute, start = PureFunction(model, results), _reset_state(model)
        (whole, _), (reseeded, _) = compute(batch, start), compute(batch, compute.reseed(start))
        if not all(_close(whole[name], reseeded[name]) for name in whole):
            raise Inconclusive("a metric is random")

        def changed(rows: int):
            split, _ = compute(None, _state_after_parts(compute, batch, rows, start, on_replicas=on_replicas))
            return [name for name in whole if not _close(whole[name], split[name])]

        even, uneven = changed(_EVEN), changed(_UNEVEN)
        return even, [name for name in uneven if name not in even]

    question = "whether metrics depend on how a batch is split"
    return run_trial(find, *SIZES, otherwise=([], []), question=question)


def split_dependent_layers(model: keras.Model, x: Any, *, on_replicas: bool) -> list[str]:
    """Finds the layers whose state ends elsewhere when a batch is split into two parts, on replicas or sequential.

    Ignores batch normalization, seeds, and states that depend on random numbers.
    """

    def find(size: int):
        owners = _state_owners(model)
        if not owners or computes_rows_independently(model):
            return []
        batch = synthetic_rows(x, _ROWS, seed=0, size=size)
        compute = PureFunction(model, lambda x: _train(model, (x,)))
        (_, whole), (_, reseeded) = compute(batch), compute(batch, compute.reseed())
        split = _state_after_parts(compute, batch, _UNEVEN, compute.start, on_replicas=on_replicas)
        values = zip(compute.variables, compute.start, whole, reseeded, split, strict=True)
        names = [
            owners[id(variable)]
            for variable, start, whole, reseeded, split in values
            if id(variable) in owners
            and not _close(start, whole)
            and _close(whole, reseeded)
            and not _close(whole, split)
        ]
        return list(dict.fromkeys(names))

    return run_trial(find, *SIZES, otherwise=[], question="whether states of layers depend on how a batch is split")


def layers_storing_examples(model: keras.layers.Layer, *arguments: Any) -> list[str]:
    """Finds the layers whose training changes a state, not a trainable weight, in a way that depends on the examples.

    Ignores batch normalization, and states that change by themselves, such as seeds and counters.
    """

    def find(size: int):
        owners = _state_owners(model)
        if not owners or computes_rows_independently(model):
            return []
        compute = PureFunction(model, lambda inputs: _train(model, inputs))
        # The second draw is far larger and smaller, so that minima and maxima change too, and has other tokens.
        draws = (0, 0.1, 0.9), (1, -1e3, 1e3)
        first, second = (
            synthetic_rows(arguments, _ROWS, seed=seed, size=size, low=low, high=high) for seed, low, high in draws
        )
        (_, one), (_, other) = map(compute, change_rows(first, second, list(range(_ROWS))))
        names = [
            owners[id(variable)]
            for variable, *values in zip(compute.variables, one, other, strict=True)
            if id(variable) in owners and not _close(*values)
        ]
        return list(dict.fromkeys(names))

    return run_trial(find, *SIZES, otherwise=[], question="whether states of layers depend on the examples")


def split_dependent_call_metrics(
    model: keras.Model, arguments: LossArguments, *, on_replicas: bool, training: bool
) -> list[str]:
    """Finds the metrics updated in `call` or `compute_loss` whose results change when a batch is split."""
    # The logs of a custom step combine metrics whose `update_state` is patched.
    metrics = [metric for metric in all_metrics(model) if not is_patched(metric, "update_state")]

    def results(data: Batch):
        if data is not None:
            x, sample_weight, y = data
            y_pred = call_model(model, (x,), training)
            model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return [keras.tree.flatten(metric.result()) for metric in metrics]

    def find(size: int):
        if not metrics:
            return []
        inputs = synthetic_rows((arguments["x"], arguments["sample_weight"]), _ROWS, seed=1, size=size)
        data = [*inputs, synthetic_rows(arguments["y"], _ROWS, seed=0, size=size, labels=True)]
        compute, start = PureFunction(model, results), _reset_state(model)
        (whole, _), (reseeded, _) = compute(data, start), compute(data, compute.reseed(start))
        split, _ = compute(None, _state_after_parts(compute, data, _UNEVEN, start, on_replicas=on_replicas))
        # Those that another seed changes are random, and tell nothing.
        return [
            metric.name
            for metric, whole, reseeded, split in zip(metrics, whole, reseeded, split, strict=True)
            if all(map(_close, whole, reseeded)) and not all(map(_close, whole, split))
        ]

    question = "whether metrics of layers depend on how a batch is split"
    return run_trial(find, *SIZES, otherwise=[], question=question)


def _state_owners(model: keras.layers.Layer) -> dict[int, str]:
    """The layer's name for each of its non-trainable variables, by id."""
    layers = [each for each in (model, *all_layers(model)) if not isinstance(each, keras.layers.BatchNormalization)]
    return {id(variable): layer.name for layer in layers for variable in layer._non_trainable_variables}


def _train(model: keras.layers.Layer, inputs: tuple[Structure, ...]) -> None:
    call_model(model, inputs, training=True)


def _reset_state(model: keras.Model) -> State:
    """The state of a model whose metrics are reset."""
    return PureFunction(model, lambda _: model.reset_metrics())(None)[1]


def _state_after_parts(compute: PureFunction, batch: Batch, rows: int, start: State, *, on_replicas: bool) -> State:
    """The state after two parts of a batch, of which the first has `rows` rows."""
    _, one = compute(take_rows(batch, 0, rows), start)
    _, two = compute(take_rows(batch, rows, _ROWS), start if on_replicas else one)
    return [_aggregate(*each) for each in zip(compute.variables, one, two, strict=True)] if on_replicas else two


def _aggregate(variable: keras.Variable, one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
    """The value of a variable over two replicas."""
    if variable.aggregation == "sum":
        return one + two
    return (one + two) / 2 if variable.aggregation == "mean" else one


def _close(one: tf.Tensor, other: tf.Tensor) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
