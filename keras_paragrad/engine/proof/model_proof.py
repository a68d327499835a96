"""Proves that a model computes each row by itself: on a few rows of the first batch, whole and in uneven parts a and b.

    f(a ++ b) = f(a) ++ f(b)                                            outputs
    d/dw (c_a, c_b) . f(a ++ b) = d/dw c_a . f(a) + d/dw c_b . f(b)     gradients
    the state after a ++ b = the state after a, and then b              states

A sum over many rows may hardly change a row's output in a part. So rows are also compared beside others: these outputs
are rounded alike.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import added_losses, all_layers, all_metrics, is_seed, percent
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.losses.weightings import Weighting
from keras_paragrad.engine.proof.pure_function import PureFunction, State, watch_weights
from keras_paragrad.engine.proof.rows import gather_rows, uneven_parts
from keras_paragrad.engine.trials.trial import (
    ADDED,
    OUTPUT,
    OUTPUT_OF_PART,
    STATE,
    STATE_CHANGE,
    STATE_ROUNDING,
    TINY,
    Inconclusive,
    few_rows,
    gradients_match,
    row_count,
    take_rows,
)


class PartsOfBatch(NamedTuple):
    """How a batch is divided.

    Attributes:
        size: The rows of a part.
        in_sequence: Whether a part sees the states that earlier parts leave.
        on_replicas: Whether replicas have parts, and their states are aggregated.
        weighting: What a part's loss is stated to be divided by, or `None`.
    """

    size: int
    in_sequence: bool
    on_replicas: bool
    weighting: Weighting | None = None


class _Results(NamedTuple):
    """Outputs, the gradients of a weighted sum of them, and the added losses with their stated divisor."""

    outputs: list[tf.Tensor]
    gradients: list[tf.Tensor]
    added: list[tf.Tensor]


class ModelProof:
    """Compares a model's outputs, gradients and states on rows of a batch with those of two parts.

    Args:
        model: A built model.
        data: The batch. No more of its rows are computed than a part has, but at least 2.
        parts: How the batch is divided.
        training: Whether the model is called for training.
    """

    def __init__(self, model: keras.Model, data: Batch, parts: PartsOfBatch, *, training: bool = True):
        self.model, self._parts, self._training = model, parts, training
        self._rows = few_rows(data, max(2, parts.size))
        self._count = row_count(self._rows)
        self._factors = tf.cos(tf.range(float(self._count)))
        self._function = PureFunction(model, self._compute, any_rows=True, total=self._count)

    def ask(self) -> str | None:
        """Why parts don't give what the whole gives, with the weights of now, or `None`.

        Raises:
            Inconclusive: The outputs are random in a way that doesn't follow Keras's seeds.
        """
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
        """What is compared of some rows, which have these factors."""
        rows, factors = data
        x, *_ = keras.utils.unpack_x_y_sample_weight(rows)
        with watch_weights(self.model) as gradients_of:
            y_pred = call_model(self.model, x, training=self._training)
            outputs = [output for output in keras.tree.flatten(y_pred) if isinstance(output, tf.Tensor)]
            target = tf.zeros([])
            for output in outputs:
                if output.dtype.is_floating and output.shape.rank and output.shape[0] in (None, factors.shape[0]):
                    flat = tf.reshape(tf.cast(output, "float32"), [tf.shape(output)[0], -1])
                    columns = tf.cos(tf.range(tf.cast(tf.shape(flat)[1], "float32")))
                    target += tf.reduce_sum(flat * factors[:, None] * columns)
        added = [tf.cast(tf.reduce_sum(loss), "float32") for loss in added_losses(self.model)]
        if added and (weighting := self._parts.weighting):
            divisor = weighting.normalizer(arguments_of(rows, y_pred))
            added = [tf.add_n(added), tf.zeros([]) if divisor.summed else tf.cast(divisor.never_zero.value, "float32")]
        return _Results(outputs, gradients_of(target), added)

    def _run(self, start: int, stop: int, state: State | None = None) -> tuple[_Results, State]:
        """The results of some of the rows, and the state that they leave."""
        return self._function(take_rows((self._rows, self._factors), start, stop), state, start)

    def _compare(self) -> str | None:
        half = self._function.half_precision
        expected, after = self._run(0, self._count)
        for output in expected.outputs:
            if output.shape[:1] != [self._count]:
                return f"{self.model.name!r} returns a tensor of shape {output.shape} for {self._count} rows"
        bounds, rest = uneven_parts(self._count)
        (one, after_one), (other, after_other) = self._run(*bounds), self._run(*rest)
        error = max(map(_error, expected.outputs, map(_join, one.outputs, other.outputs)), default=0.0)
        replaced = max(map(_error_of_inner, expected.outputs, self._outputs_among_others()), default=0.0)
        if error > OUTPUT_OF_PART.of(half) or replaced > OUTPUT.of(half):
            again, _ = self._run(0, self._count)
            if any(_error(*pair) > OUTPUT.single for pair in zip(expected.outputs, again.outputs, strict=True)):
                raise Inconclusive("the outputs are random")
            return self._says("outputs", max(error, replaced))
        sums = [a + b for a, b in zip(one.gradients, other.gradients, strict=True)]
        finite = all(bool(tf.reduce_all(tf.math.is_finite(gradient))) for gradient in expected.gradients)
        if finite and not gradients_match(expected.gradients, sums, half_precision=half):
            return self._says("gradients", max(map(_error, expected.gradients, sums)))
        if expected.added and self._parts.weighting:
            error = _error_of_added(expected.added, one.added, other.added)
            if error > ADDED:
                return f"The losses that layers of {self.model.name!r} add are {percent(error)} off in parts of a batch"
        return self._compare_states(expected, after, after_one, after_other)

    def _outputs_among_others(self) -> list[tf.Tensor]:
        """The outputs of the same rows at the same places, but for the first and last, which are replaced."""
        order = [self._count // 2, *range(1, self._count - 1), self._count // 2]
        return self._function((gather_rows(self._rows, order), self._factors))[0].outputs

    def _compare_states(self, expected: _Results, whole: State, one: State, other: State) -> str | None:
        """Compares the states after both parts: one after the other, and aggregated over replicas."""
        function, ends = self._function, list[State]()
        start, variables = function.start, function.variables
        if self._parts.in_sequence and (self._has_changed(one) or self._has_changed(other)):
            # In either order: the last part alone may have what the whole leaves, such as the largest row.
            for state, bounds in zip((one, other), reversed(uneven_parts(self._count)), strict=True):
                end, error = self._after(state, bounds, expected)
                if error > OUTPUT_OF_PART.of(function.half_precision):
                    return self._says("outputs", error)
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
            and not all(_changed_alike(start[index], whole[index], end[index]) for end in ends)
        ]
        if found:
            # With other seeds: what draws random numbers differs anyway.
            _, random = self._run(0, self._count, function.reseed())
            found = [index for index in found if _close(whole[index], random[index])]
        names = dict.fromkeys(owners[id(variables[index])] for index in found)
        return f"Parts of a batch leave another state of {', '.join(names)} than the whole batch" if names else None

    def _has_changed(self, state: State) -> bool:
        """Whether a state differs from the start, but in seeds."""
        triples = zip(self._function.variables, self._function.start, state, strict=True)
        return any(not (is_seed(variable) or np.array_equal(one, other)) for variable, one, other in triples)

    def _after(self, one: State, bounds: tuple[int, int], expected: _Results) -> tuple[State, float]:
        """The state after a part that begins with another one's, and how far its outputs are off."""
        triples = zip(self._function.variables, self._function.start, one, strict=True)
        begin = [before if is_seed(variable) else value for variable, before, value in triples]
        found, end = self._run(*bounds, begin)
        return end, max(map(_error, take_rows(expected.outputs, *bounds), found.outputs), default=0.0)

    def find_metric_differences(self) -> list[str]:
        """The names of the metrics that the model updates in its call, and whose results differ after two parts."""
        if self._count < 2:
            return []
        bounds, rest = uneven_parts(self._count)
        return different_metrics(self.model, self._run(0, self._count)[1], self._run(*rest, self._run(*bounds)[1])[1])

    def _says(self, what: str, error: float) -> str:
        return (
            f"The {what} of {self.model.name!r} for some rows of a batch depend on its other rows: in parts they are "
            f"{percent(error)} off"
        )


def different_metrics(model: keras.Model, one: State, other: State) -> list[str]:
    """The names of metrics of layers, or of the model's own, whose results differ in two states of all variables."""
    metrics = all_metrics(model)
    if not metrics:
        return []
    results = PureFunction(model, lambda _: [keras.tree.flatten(metric.result()) for metric in metrics])
    pairs = zip(results(None, one)[0], results(None, other)[0], strict=True)
    return [metric.name for metric, pair in zip(metrics, pairs, strict=True) if not all(map(_close, *pair))]


def _join(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.concat([one, other], 0) if one.shape[1:] == other.shape[1:] else one


def _error(expected: tf.Tensor, found: tf.Tensor) -> float:
    """The largest difference, over the largest finite value of what is expected."""
    if expected.shape != found.shape:
        return float("inf")
    if not expected.dtype.is_floating:
        return 0.0 if np.array_equal(expected, found) else float("inf")
    one, other = (np.asarray(tf.cast(tensor, "float64")) for tensor in (expected, found))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    scale = np.abs(one[np.isfinite(one)]).max(initial=0)
    off = np.abs(one - other)[~same].max(initial=0)
    return float(off / scale) if scale else float(off > 0)


def _error_of_inner(expected: tf.Tensor, found: tf.Tensor) -> float:
    """The error without the first and last rows, over the largest of all."""
    if expected.shape != found.shape:
        return float("inf")
    return _error(expected, tf.concat([expected[:1], found[1:-1], expected[-1:]], 0))


def _error_of_added(whole: list[tf.Tensor], *parts: list[tf.Tensor]) -> float:
    """How far the weighted mean, or sum, of the parts' added losses is off the whole's."""
    value, total = float(whole[0]), sum(float(divisor) for _, divisor in parts)
    added = sum(float(part) * (float(divisor) or 1.0) for part, divisor in parts) / (total or 1.0)
    return abs(added - value) / max(abs(value), 1e-30)


def state_owners(model: keras.layers.Layer) -> dict[int, str]:
    """The name of each variable's layer, by the variable's id; but of `BatchNormalization`, and of metrics."""
    layers = [layer for layer in (model, *all_layers(model)) if not isinstance(layer, keras.layers.BatchNormalization)]
    return {
        id(variable): layer.name
        for layer in layers
        # For example a kernel that a layer normalizes.
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
    }


def aggregate(variable: keras.Variable, *values: tf.Tensor) -> tf.Tensor:
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
