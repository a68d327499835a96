"""Proves that a model computes each row by itself, on a few rows in uneven parts a and b.

    f(a ++ b) = f(a) ++ f(b)                                            outputs
    d/dw (c_a, c_b) . f(a ++ b) = d/dw c_a . f(a) + d/dw c_b . f(b)     gradients
    the state after a ++ b = the state after a, and then b              states

If a row's output depends on a sum over many rows, a part may hardly change it. So the first and last rows are replaced
as well, and outputs of the rows between compared. The number of rows stays, and so does rounding.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import added_losses, all_layers, all_metrics, is_seed, percent
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.proof.pure_function import PureFunction, State, watch_weights
from keras_paragrad.engine.trials.trial import (
    ADDED,
    OUTPUT,
    OUTPUT_OF_PART,
    STATE,
    STATE_CHANGE,
    Inconclusive,
    among_others,
    close,
    few_rows,
    gather_rows,
    gradients_match,
    largest_error,
    row_count,
    sum_with_factors,
    take_rows,
    uneven_parts,
    with_ends_of,
)


class PartsOfBatch(NamedTuple):
    """How a batch is divided.

    Attributes:
        loss_divisor: Computes the weight of a part.
        size: The rows of a part.
        in_sequence: Whether a part sees the states that earlier parts leave.
        on_replicas: Whether replicas compute parts, whose states are then aggregated.
        training: Whether the model is called for training.
    """

    loss_divisor: LossDivisor
    size: int
    in_sequence: bool
    on_replicas: bool
    training: bool = True


class _Results(NamedTuple):
    """Outputs, the gradients of their weighted sum, and added losses, followed by a stated divisor."""

    outputs: list[tf.Tensor]
    gradients: list[tf.Tensor]
    added: list[tf.Tensor]


class ModelProof:
    """Compares outputs, gradients and states of a model on a few rows with those on two parts.

    There are as many rows as a part has, but at least 2.
    """

    def __init__(self, model: keras.Model, data: Batch, parts: PartsOfBatch):
        self.model, self._parts, self._training = model, parts, parts.training
        self._rows = few_rows(data, max(2, parts.size))
        self._count = row_count(self._rows)
        self._factors = tf.cos(tf.range(float(self._count)))
        self._function = PureFunction(model, self._compute, any_rows=True, total=self._count)

    def ask(self) -> str | None:
        """Why parts don't give what the whole gives, with the current weights, or `None`."""
        if self._count < 2:
            return None
        self._function.renew()
        try:
            return self._compare()
        except Inconclusive:
            if not self._training:
                raise
        self._training = False
        self._function = PureFunction(self.model, self._compute, any_rows=True, total=self._count)
        return self._compare()

    def _compute(self, data: Any) -> _Results:
        """What is compared, for some rows and the factors of their outputs."""
        rows, factors = data
        x, *_ = keras.utils.unpack_x_y_sample_weight(rows)
        with watch_weights(self.model) as gradients_of:
            y_pred = call_model(self.model, x, training=self._training)
            outputs = [output for output in keras.tree.flatten(y_pred) if isinstance(output, tf.Tensor)]
            target = sum_with_factors(outputs, factors)
        added = [tf.cast(tf.reduce_sum(loss), "float32") for loss in added_losses(self.model)]
        if added and (weighting := self._parts.loss_divisor.stated):
            divisor = weighting.of_part(arguments_of(rows, y_pred))
            added = [tf.add_n(added), tf.zeros([]) if divisor.summed else tf.cast(divisor.never_zero.value, "float32")]
        return _Results(outputs, gradients_of(target), added)

    def _run(self, start: int, stop: int, state: State | None = None) -> tuple[_Results, State]:
        """The results for rows `start` to `stop`, and the state after them."""
        return self._function(take_rows((self._rows, self._factors), start, stop), state, start)

    def _compare(self) -> str | None:
        half = self._function.half_precision
        expected, after = self._run(0, self._count)
        for output in expected.outputs:
            if output.shape[:1] != [self._count]:
                return f"{self.model.name!r} returns a tensor of shape {output.shape} for {self._count} rows"
        bounds, rest = uneven_parts(self._count)
        (one, after_one), (other, after_other) = self._run(*bounds), self._run(*rest)
        error = _largest(expected.outputs, map(_join, one.outputs, other.outputs))
        # All rows but the first and last, which are replaced, stay where they are.
        others = self._function((gather_rows(self._rows, among_others(self._count)), self._factors))[0].outputs
        replaced = _largest(expected.outputs, map(with_ends_of, expected.outputs, others))
        if error > OUTPUT_OF_PART.of(half) or replaced > OUTPUT.of(half):
            again, _ = self._run(0, self._count)
            if _largest(expected.outputs, again.outputs) > OUTPUT.single:
                raise Inconclusive("the outputs are random")
            return self._message_of("outputs", max(error, replaced))
        sums = [a + b for a, b in zip(one.gradients, other.gradients, strict=True)]
        finite = all(bool(tf.reduce_all(tf.math.is_finite(gradient))) for gradient in expected.gradients)
        if finite and not gradients_match(expected.gradients, sums, half_precision=half):
            return self._message_of("gradients", _largest(expected.gradients, sums))
        if expected.added and self._parts.loss_divisor.stated:
            error = _error_of_added(expected.added, one.added, other.added)
            if error > ADDED:
                return f"The losses that layers of {self.model.name!r} add are {percent(error)} off in parts of a batch"
        return self._compare_states(expected, after, after_one, after_other)

    def _compare_states(self, expected: _Results, whole: State, one: State, other: State) -> str | None:
        """Compares the states after both parts, in sequence or aggregated over replicas, with the whole's."""
        function, ends = self._function, list[State]()
        start, variables = function.start, function.variables
        if self._parts.in_sequence and (self._has_changed(one) or self._has_changed(other)):
            # Either part comes last: a part may leave the whole's state by itself, such as the largest row.
            for state, bounds in zip((one, other), reversed(uneven_parts(self._count)), strict=True):
                end, error = self._run_after(state, bounds, expected)
                if error > OUTPUT_OF_PART.of(function.half_precision):
                    return self._message_of("outputs", error)
                ends.append(end)
        if self._parts.on_replicas:
            for order in ((one, other), (other, one)):
                ends.append([aggregate(*values) for values in zip(variables, *order, strict=True)])
        owners = state_owners(self.model)
        found = [
            index
            for index, variable in enumerate(variables)
            if id(variable) in owners
            and not is_seed(variable)
            and not all(_have_equal_changes(start[index], whole[index], end[index]) for end in ends)
        ]
        if found:
            # States that change with the seeds are random, and can't be compared.
            _, random = self._run(0, self._count, function.reseed())
            found = [index for index in found if close(whole[index], random[index], STATE)]
        names = dict.fromkeys(owners[id(variables[index])] for index in found)
        return f"Parts of a batch leave another state of {', '.join(names)} than the whole batch" if names else None

    def _has_changed(self, state: State) -> bool:
        """Whether a state differs from the start in anything but seeds."""
        triples = zip(self._function.variables, self._function.start, state, strict=True)
        return any(not (is_seed(variable) or np.array_equal(one, other)) for variable, one, other in triples)

    def _run_after(self, one: State, bounds: tuple[int, int], expected: _Results) -> tuple[State, float]:
        """Runs a part from the state that another part has left. Returns the new state, and the outputs' error."""
        triples = zip(self._function.variables, self._function.start, one, strict=True)
        begin = [before if is_seed(variable) else value for variable, before, value in triples]
        found, end = self._run(*bounds, begin)
        return end, _largest(take_rows(expected.outputs, *bounds), found.outputs)

    def find_metric_differences(self) -> list[str]:
        """The names of metrics that the model updates in its call and that parts change."""
        if self._count < 2:
            return []
        bounds, rest = uneven_parts(self._count)
        return different_metrics(self.model, self._run(0, self._count)[1], self._run(*rest, self._run(*bounds)[1])[1])

    def _message_of(self, what: str, error: float) -> str:
        return (
            f"The {what} of {self.model.name!r} for some rows of a batch depend on its other rows: in parts they are "
            f"{percent(error)} off"
        )


def different_metrics(model: keras.Model, one: State, other: State) -> list[str]:
    """The names of metrics, of the model and its layers, that differ in two states of all variables."""
    metrics = all_metrics(model)
    if not metrics:
        return []
    results = PureFunction(model, lambda _: [keras.tree.flatten(metric.result()) for metric in metrics])
    pairs = zip(results(None, one)[0], results(None, other)[0], strict=True)
    return [metric.name for metric, pair in zip(metrics, pairs, strict=True) if not close(*pair, STATE)]


def _join(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.concat([one, other], 0) if one.shape[1:] == other.shape[1:] else one


def _largest(expected: Iterable[tf.Tensor], found: Iterable[tf.Tensor]) -> float:
    return max((float(largest_error(*pair)) for pair in zip(expected, found, strict=True)), default=0.0)


def _error_of_added(whole: list[tf.Tensor], *parts: list[tf.Tensor]) -> float:
    """The relative error of the parts' added losses, as a mean weighted by divisors, or as a sum."""
    value, total = float(whole[0]), sum(float(divisor) for _, divisor in parts)
    added = sum(float(part) * (float(divisor) or 1.0) for part, divisor in parts) / (total or 1.0)
    return abs(added - value) / max(abs(value), 1e-30)


def state_owners(model: keras.layers.Layer) -> dict[int, str]:
    """The name of each variable's layer, by the variable's id. Leaves out `BatchNormalization` and metrics."""
    layers = [layer for layer in (model, *all_layers(model)) if not isinstance(layer, keras.layers.BatchNormalization)]
    return {
        id(variable): layer.name
        for layer in layers
        # For example a kernel that a layer normalizes.
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
    }


def aggregate(variable: keras.Variable, *values: tf.Tensor) -> tf.Tensor:
    """Aggregates a variable's values over replicas. Without an aggregation, returns the first value."""
    if variable.aggregation == "sum":
        return tf.add_n(values)
    return tf.add_n(values) / len(values) if variable.aggregation == "mean" else values[0]


def _have_equal_changes(start: Any, one: Any, other: Any) -> bool:
    """Whether the changes from `start` to `one` and from `start` to `other` are equal, within the tolerance."""
    one, other, start = (tf.cast(state, "float64") for state in (one, other, start))
    return float(largest_error(one, other, start)) <= STATE_CHANGE
