"""Finds, by a trial on synthetic rows, whether metrics and states of layers depend on how a batch is split.

The parts run on replicas, where each starts with the same state and the states are aggregated, or in sequence, where
each starts with the state that the part before it leaves.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import added_losses, all_layers, all_metrics
from keras_paragrad.compat.state import is_patched
from keras_paragrad.compat.types import Batch, LossArguments, Structure
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.probes.pure_function import PureFunction, State, UnknownState, is_seed
from keras_paragrad.engine.probes.row_independence import computes_rows_independently, has_value_per_example
from keras_paragrad.engine.probes.tolerances import STATE, STATE_CHANGE, STATE_ROUNDING, TINY
from keras_paragrad.engine.probes.trial import (
    SIZES,
    Inconclusive,
    change_rows,
    run_trial,
    synthetic_rows,
    take_rows,
)

_ROWS = 8
# The rows of the first of two parts, if they are equal, and if they are unequal (as in the last batch of an epoch).
_EVEN, _UNEVEN = 4, 6
# The ranges of rows. The second, larger one also moves minima and maxima.
RANGES = ((0.1, 0.9), (-1e3, 1e3))

# Maps rows, the variables' values and the index of the first row to results and the variables' new values.
RunFromState = Callable[[Any, State, int], tuple[Any, State]]


def split_dependent_metrics(
    model: keras.Model, y: Structure, y_pred: Structure, sample_weight: Structure, *, on_replicas: bool
) -> tuple[list[str], list[str]]:
    """The compiled metrics whose results equal parts of a batch change, and the others that unequal parts change.

    The parts run `on_replicas`, or in sequence. Both lists are empty if the metrics can't be called on synthetic rows.
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
        whole, reseeded, *splits = _results(model, results, batch, _EVEN, _UNEVEN, on_replicas=on_replicas)
        if not all(_close(whole[name], reseeded[name]) for name in whole):
            raise Inconclusive("a metric is random")
        even, uneven = ([name for name in whole if not _close(whole[name], split[name])] for split in splits)
        return even, [name for name in uneven if name not in even]

    question = "whether metrics depend on how a batch is split"
    return run_trial(find, *SIZES, otherwise=([], []), question=question)


def split_dependent_layers(model: keras.Model, x: Any, *, on_replicas: bool, in_sequence: bool) -> list[str]:
    """Finds layers whose state depends on how synthetic rows are split, or is read after other parts.

    Ignores batch normalization, seeds, and states that depend on random numbers that aren't drawn per row. Tries parts
    `on_replicas` and `in_sequence`, as requested.
    """
    split = BatchSplit(on_replicas, in_sequence, _ROWS, _UNEVEN)

    def find(size: int):
        batches = (
            synthetic_rows(x, _ROWS, seed=index, size=size, low=low, high=high)
            for index, (low, high) in enumerate(RANGES)
        )
        return layers_dependent_on(model, batches, split)

    return run_trial(find, *SIZES, otherwise=[], question="whether states of layers depend on how a batch is split")


def layers_dependent_on(model: keras.Model, batches: Iterable[Batch], split: "BatchSplit") -> list[str]:
    """The layers whose states after one of these batches depend on how it is split."""
    if computes_rows_independently(model):
        return []
    owners = _state_owners(model)
    compute = PureFunction(model, lambda x: _train(model, (x,)), any_rows=True, total=split.rows)
    found: list[str] = []
    for index, batch in enumerate(batches):
        try:
            variables = split_dependent_states(compute.variables, compute, compute.start, batch, split)
            found += [owners[id(variable)] for variable in variables if id(variable) in owners]
        except UnknownState as state:
            if not state.resources:
                raise
            return _owners_of_resources(model, state.resources)
        except Exception:
            # A layer may reject large numbers.
            if not index:
                raise
    return list(dict.fromkeys(found))


class BatchSplit(NamedTuple):
    """A split of a batch: on replicas or in sequence, the number of rows, and how many are in the first part."""

    on_replicas: bool
    in_sequence: bool
    rows: int
    first: int


def split_dependent_states(
    variables: Sequence[keras.Variable], run: RunFromState, start: State, batch: Batch, split: BatchSplit
) -> list[keras.Variable]:
    """The variables whose values differ after two parts and after the whole, or that the second part reads changed.

    Leaves out variables that other seeds change. `start` has the variables' values before the batch.
    """
    reseeded = [value + 1 if is_seed(variable) else value for variable, value in zip(variables, start, strict=True)]
    part, rest = take_rows(batch, 0, split.first), take_rows(batch, split.first, split.rows)
    (_, whole), (_, random), (_, first) = run(batch, start, 0), run(batch, reseeded, 0), run(part, start, 0)
    # The results of the second part, as if there were no first one.
    alone, last = run(rest, start, split.first)
    # Try both orders: without aggregation, a replica keeps its own value.
    orders = ((first, last), (last, first)) if split.on_replicas else ()
    ends = [[_aggregate(*values) for values in zip(variables, *order, strict=True)] for order in orders]
    changed = [not _close(*values) for values in zip(start, first, strict=True)]
    read = False
    if split.in_sequence:
        ends.append(run(rest, first, split.first)[1])
        # With the seeds of the start, random numbers are the same: a difference comes from the first part's changes.
        seeds = zip(variables, start, first, strict=True)
        after = run(rest, [before if is_seed(variable) else value for variable, before, value in seeds], split.first)[0]
        same = zip(*map(_numbers, (alone, run(rest, start, split.first)[0], after)), strict=True)
        read = any(_close(one, again) and not _close(one, other) for one, again, other in same)

    def differs(index: int) -> bool:
        if not _close(whole[index], random[index]) or is_seed(variables[index]):
            return False
        if read and changed[index]:
            return True
        values = [whole[index], first[index], last[index]]
        return not all(_close(start[index], value) for value in values) and not all(
            _changed_alike(start[index], whole[index], end[index]) for end in ends
        )

    return [variable for index, variable in enumerate(variables) if differs(index)]


def layers_storing_examples(model: keras.layers.Layer, *arguments: Any) -> list[str]:
    """Finds layers whose training changes a non-trainable state depending on the examples.

    Ignores batch normalization, and states that don't depend on data, such as seeds and counters.
    """

    def find(size: int):
        owners = _state_owners(model)
        if not owners or computes_rows_independently(model):
            return []
        compute = PureFunction(model, lambda inputs: _train(model, inputs))
        # The second draw also has other tokens.
        first, second = (
            synthetic_rows(arguments, _ROWS, seed=seed, size=size, low=low, high=high)
            for seed, (low, high) in enumerate(RANGES)
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
            compute_loss(model, data, training=training, untracked=False)
        return [keras.tree.flatten(metric.result()) for metric in metrics]

    def find(size: int):
        if not metrics:
            return []
        x, weights = synthetic_rows((arguments["x"], arguments["sample_weight"]), _ROWS, seed=1, size=size)
        data = x, synthetic_rows(arguments["y"], _ROWS, seed=0, size=size, labels=True), weights
        of_metrics = zip(*_results(model, results, data, _UNEVEN, on_replicas=on_replicas), strict=True)
        # Metrics that another seed changes are random, and say nothing.
        return [
            metric.name
            for metric, (whole, reseeded, split) in zip(metrics, of_metrics, strict=True)
            if all(map(_close, whole, reseeded)) and not all(map(_close, whole, split))
        ]

    question = "whether metrics of layers depend on how a batch is split"
    return run_trial(find, *SIZES, otherwise=[], question=question)


def _state_owners(model: keras.layers.Layer) -> dict[int, str]:
    """The name of each variable's layer, by the variable's id."""
    layers = [layer for layer in (model, *all_layers(model)) if not isinstance(layer, keras.layers.BatchNormalization)]
    return {
        id(variable): layer.name
        for layer in layers
        # For example a kernel that a layer normalizes.
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
    }


def _owners_of_resources(model: keras.layers.Layer, resources: list[tf.Tensor]) -> list[str]:
    """The layers that hold these `tf.Variable`s as attributes; the model, if none does."""
    handles = set(map(id, resources))
    layers = (model, *all_layers(model))
    names = [
        layer.name
        for layer in layers
        if any(
            isinstance(attribute, tf.Variable) and id(attribute.handle) in handles for attribute in vars(layer).values()
        )
    ]
    return names or [model.name]


def _train(model: keras.layers.Layer, inputs: tuple[Structure, ...]) -> list[tf.Tensor]:
    """The outputs and added losses of a call in training, for its changes of state."""
    outputs = call_model(model, *inputs, training=True)
    return [tensor for tensor in (*keras.tree.flatten(outputs), *added_losses(model)) if tf.is_tensor(tensor)]


def _results(
    model: keras.Model, results: Callable[[Any], Any], batch: Batch, *firsts: int, on_replicas: bool
) -> list[Any]:
    """The results after a batch, after the batch with other seeds, and after two parts, for each size in `firsts`.

    `results` is called with data to update metrics, and with `None` to return their results only.
    """
    compute, start = PureFunction(model, results), reset_state(model)
    whole = [compute(batch, state)[0] for state in (start, compute.reseed(start))]
    parts = [[take_rows(batch, 0, first), take_rows(batch, first, _ROWS)] for first in firsts]
    return [*whole, *(results_after_parts(compute, part, start, on_replicas=on_replicas) for part in parts)]


def reset_state(model: keras.Model) -> State:
    """A state of the model with its metrics reset."""
    return PureFunction(model, lambda _: model.reset_metrics())(None)[1]


def results_after_parts(compute: PureFunction, parts: Sequence[Batch], start: State, *, on_replicas: bool) -> Any:
    """The results in the state after all parts; `compute` returns the results of a state for the data `None`."""
    if on_replicas:
        states = [compute(part, start)[1] for part in parts]
        state = [_aggregate(*values) for values in zip(compute.variables, *states, strict=True)]
    else:
        state = start
        for part in parts:
            state = compute(part, state)[1]
    return compute(None, state)[0]


def _aggregate(variable: keras.Variable, *values: tf.Tensor) -> tf.Tensor:
    """Aggregates a variable's values over replicas; without an aggregation, takes the first replica's."""
    if variable.aggregation == "sum":
        return tf.add_n(values)
    return tf.add_n(values) / len(values) if variable.aggregation == "mean" else values[0]


def _close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=STATE, atol=TINY, equal_nan=True)


def _changed_alike(start: Any, one: Any, other: Any) -> bool:
    """Whether a state has changed equally from `start` to `one` and to `other`, within the tolerance."""
    before, one, other = (np.asarray(state, "float64") for state in (start, one, other))
    largest_change = np.abs(one - before)[np.isfinite(one)].max(initial=0)
    rounding = STATE_ROUNDING * np.abs(one[np.isfinite(one)]).max(initial=0)
    return np.allclose(one, other, rtol=0, atol=STATE_CHANGE * largest_change + rounding, equal_nan=True)


def _numbers(results: Any) -> list[np.ndarray]:
    """The numeric results, as float64 arrays."""
    return [np.asarray(result, "float64") for result in keras.tree.flatten(results) if _is_number(result)]


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray) or value.dtype.is_floating or value.dtype.is_integer
