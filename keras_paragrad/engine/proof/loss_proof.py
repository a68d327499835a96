"""Proves on the outputs of the first update's rows that losses and metrics add up over parts.

The outputs y = f(x) are computed in parts, as in training. For uneven parts (x_i, y_i), whose loss L divides by d_i:

    sum_i d_i L(x_i, y_i) / sum_i d_i = L(x, y), and so for the gradient with respect to y        (a sum: d_i = 1)

Errors of L are relative to |L + size|, where the size, sum |dL/dy y|, adds up as L does. If changing the last digits of
y makes an error as large, it is rounding.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model, mask_of, with_mask
from keras_paragrad.compat.model import is_seed, percent
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.divisors import WEIGHTINGS
from keras_paragrad.engine.losses.terms import arguments_of, compute_loss
from keras_paragrad.engine.proof.model_proof import PartsOfBatch, aggregate, different_metrics
from keras_paragrad.engine.proof.pure_function import PureFunction, State
from keras_paragrad.engine.trials.trial import (
    METRIC,
    Inconclusive,
    close,
    even_parts,
    first_line,
    gather_rows,
    row_count,
    take_rows,
    uneven_parts,
    unexplained_error,
)

# The most bytes of outputs, unless a part's activations take more.
MOST_BYTES = 2**24
_LAST_DIGITS = 1e-6
# As arrays, the gradient of a loss with respect to the outputs, and the loss; and the divisors that are tried.
Computed = tuple[list[np.ndarray], list[np.ndarray], list[float]]


class WrongWeightingError(IndivisibleError):
    """A loss isn't divided by what the stated weighting says, but by what another weighting says."""


class LossProof:
    """Compares the loss on parts of the first update's rows with the loss on all."""

    def __init__(self, model: keras.Model, data: Batch, parts: PartsOfBatch):
        self.model, self.loss_divisor, self._training = model, parts.loss_divisor, parts.training
        self._rows, self.size = data, parts.size
        self._outputs = PureFunction(model, self._forward, any_rows=True)
        self._loss = PureFunction(model, self._compute, any_rows=True, total=row_count(data))
        stated = self.loss_divisor.stated
        self._stated = stated.argument if stated else ""
        # Other weightings, to be suggested in place of a stated one that is wrong.
        self._others = [each for each in WEIGHTINGS.values() if stated and each.name != stated.name]

    def ask(self) -> str | None:
        """Why the loss of parts isn't the whole's, with the model's current weights, or `None`."""
        rows, outputs = self.with_outputs()
        count = row_count(rows)
        if count < 2:
            return None
        self._loss.renew()
        data = rows, outputs
        whole, after = self._run(data, 0)
        if self._loss.assigned or self._changes(after):
            return f"The loss of {self.model.name!r} assigns variables, which each part of a batch would change in turn"
        try:
            parts = [self._run(take_rows(data, *bounds), bounds[0])[0] for bounds in uneven_parts(count)]
        except Exception as error:
            if self.loss_divisor.weighting == "auto":
                fewer = uneven_parts(count)[0][1]
                return f"The loss of {self.model.name!r} fails on {fewer} of {count} rows: {first_line(error)}"
            parts = [self._run(take_rows(data, *bounds), bounds[0])[0] for bounds in even_parts(count, self.size)]
        if not (difference := self._compare(whole, _add(parts, 0), data)):
            return None
        name, (what, error) = self.model.name, difference
        message = f"On {count} rows of the first batch, the {what} of {name!r} in parts is {error} off"
        fitting = [
            weighting.argument
            for index, weighting in enumerate(self._others, 1)
            if not self._compare(whole, _add(parts, index), data)
        ]
        if fitting:
            raise WrongWeightingError(
                f"weighting={self._stated} is not what the loss of {name!r} is divided by. {message}; "
                f"weighting={fitting[0]} fits. Write that, or leave it out."
            )
        return f"{message} the {what} of the whole batch"

    def find_metric_differences(self) -> list[str]:
        """The names of the metrics that `compute_loss` updates and that differ after two parts."""
        count = row_count(data := self.with_outputs())
        if count < 2:
            return []
        bounds, rest = uneven_parts(count)
        after = self._run(take_rows(data, *bounds), bounds[0])[1]
        parts = self._run(take_rows(data, *rest), rest[0], after)[1]
        return different_metrics(self.model, self._run(data, 0)[1], parts)

    def _compare(self, whole: Computed, total: Computed, data: Any) -> tuple[str, str] | None:
        """What differs between the parts' sum and the whole, and by how much, or `None`."""
        half = self._loss.half_precision
        if error := unexplained_error(whole[0], total[0], lambda: [self._perturbed(data)[0]], half_precision=half):
            return "gradient of the loss", percent(error)
        if error := unexplained_error(whole[1], total[1], lambda: self._values_with_noise(data), half_precision=half):
            return "loss", percent(error)
        return None

    def _forward(self, data: Any) -> tuple[Structure, list[tf.Tensor | None]]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = call_model(self.model, x, training=self._training)
        leaves = keras.tree.flatten(y_pred)
        if any(leaf.shape.rank == 0 for leaf in leaves):
            raise Inconclusive("the outputs have no row for each example")
        return y_pred, [mask_of(leaf) for leaf in leaves]

    def with_outputs(self) -> tuple[Batch, Any]:
        """The rows and their outputs, computed part by part. Where outputs are large, only the first rows."""
        self._outputs.renew()
        bounds = even_parts(row_count(self._rows), self.size)
        outputs, taken = [], 0
        for start, stop in bounds:
            outputs.append(self._outputs(take_rows(self._rows, start, stop))[0])
            taken, size = stop, sum(map(_bytes, outputs))
            if size > MOST_BYTES and size > bytes_of(self._outputs.graph(take_rows(self._rows, *bounds[0]))):
                break
        rows = take_rows(self._rows, 0, taken)
        return rows, keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else tf.concat(parts, 0), *outputs
        )

    def _compute(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], tf.Tensor]:
        """Traces a loss, its size, its gradient with respect to the outputs, and the divisors (0: a sum)."""
        rows, outputs = data
        real = [output for output in keras.tree.flatten(outputs[0]) if output.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(real)
            loss, arguments, terms = compute_loss(
                self.model, rows, y_pred=mark_outputs(outputs), training=self._training
            )
            # Keras differentiates the sum of an unreduced loss.
            total = tf.cast(tf.reduce_sum(loss), "float32")
        gradients: Any = tape.gradient(total, real, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        weights = [
            self.loss_divisor(self.model, arguments, terms),
            *(each.of_part(arguments) for each in self._others),
        ]
        divisors = [tf.zeros([]) if each.summed else tf.cast(each.never_zero.value, "float32") for each in weights]
        dense = [tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in gradients]
        size = tf.zeros([])
        for gradient, output in zip(dense, real, strict=True):
            size += tf.reduce_sum(tf.abs(gradient * tf.cast(output, "float32")))
        return total, size, dense, tf.stack(divisors)

    def _run(self, data: Any, first: int, state: State | None = None) -> tuple[Computed, State]:
        (value, size, gradients, divisors), after = self._loss(data, state, first)
        arrays = [np.asarray(gradient, "float64") for gradient in gradients]
        return (arrays, [np.asarray(value, "float64") + float(size)], [float(each) for each in divisors]), after

    def _changes(self, after: State) -> bool:
        """Whether the loss has changed variables of the model other than metrics and seeds."""
        triples = zip(self._loss.variables, self._loss.start, after, strict=True)
        return any(
            not (is_seed(each) or each.aggregation == "sum") and not np.array_equal(before, value, equal_nan=True)
            for each, before, value in triples
            if each.dtype != "string"
        )

    def _values_with_noise(self, data: Any) -> list[list[np.ndarray]]:
        """The loss after changes of last digits, and in another order of rows: the noise of rounding."""
        values = [self._perturbed(data)[1]]
        if not self._loss.draws:
            values.append(self._run(gather_rows(data, range(row_count(data))[::-1]), 0)[0][1])
        return values

    def _perturbed(self, data: Any) -> Computed:
        """The whole's results after changes that affect only rounding and random numbers."""
        rows, (y_pred, masks) = data
        return self._run((rows, (perturb(y_pred), masks)), 0, perturb(self._loss.reseed()))[0]


def _add(parts: list[Computed], index: int) -> Computed:
    """The gradient and the mean (or sum) of the parts' losses, weighted by the divisors of this index."""
    divisors = [each[2][index] for each in parts]
    weights, total = [divisor or 1.0 for divisor in divisors], sum(divisors) or 1.0
    value = sum(weight * part[1][0] for weight, part in zip(weights, parts, strict=True)) / total
    pieces = [[weight * each for each in part[0]] for weight, part in zip(weights, parts, strict=True)]
    return [np.concatenate(each) / total for each in zip(*pieces, strict=True)], [np.asarray(value)], [total]


def mark_outputs(outputs: tuple[Structure, list[tf.Tensor | None]]) -> Structure:
    y_pred, masks = outputs
    marked = [with_mask(*arguments) for arguments in zip(keras.tree.flatten(y_pred), masks, strict=True)]
    return keras.tree.pack_sequence_as(y_pred, marked)


def perturb(nested: Any) -> Any:
    """Changes the last digits (of float32) of real numbers in nested tensors."""

    def change(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        return value * tf.cast(1 + _LAST_DIGITS, value.dtype)

    return keras.tree.map_structure(change, nested)


def bytes_of(graph: tf.Graph) -> int:
    """The bytes of all tensors of a graph."""
    return sum(_bytes(list(operation.outputs)) for operation in graph.get_operations())


def _bytes(nested: Structure) -> int:
    tensors = [tensor for tensor in keras.tree.flatten(nested) if tensor is not None and tensor.dtype != tf.resource]
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors)


class MetricProof:
    """Compares the results of compiled metrics on parts with the results on the whole.

    `summed` says whether the parts' states are aggregated, as replicas' are. If not, parts run in sequence.
    """

    def __init__(self, outputs: LossProof, summed: bool):
        self.model, self._outputs, self._summed = outputs.model, outputs, summed

    def ask(self) -> str | None:
        """Which metrics differ, and what to write, or `None`."""
        batch = self._outputs.with_outputs()
        compute = PureFunction(self.model, self._results)
        start = PureFunction(self.model, lambda _: self.model.reset_metrics())(None)[1]
        count = row_count(batch)
        reverse = gather_rows(batch, range(count)[::-1])
        whole, reordered = (compute(ordered, start)[0] for ordered in (batch, reverse))
        parts, state = [take_rows(batch, *each) for each in even_parts(count, self._outputs.size)], start
        if self._summed:
            states = [compute(part, start)[1] for part in parts]
            state = [aggregate(*values) for values in zip(compute.variables, *states, strict=True)]
        else:
            for part in parts:
                state = compute(part, state)[1]
        split, tolerance = compute(None, state)[0], METRIC.of(compute.half_precision)
        # A metric that depends on the order of rows is random or numerically unstable.
        differences = [
            f"{name} is {_largest(split[name]):.4g} on {len(parts)} parts of the first batch, and "
            f"{_largest(whole[name]):.4g} on it"
            for name in whole
            if close(whole[name], reordered[name], tolerance) and not close(whole[name], split[name], tolerance)
        ]
        if not differences:
            return None
        return (
            f"{'; '.join(differences)}. Let each metric accumulate sums over examples, with add_variable(..., "
            "aggregation='sum') and assign_add, or use a function that returns one value per example"
        )

    def _results(self, batch: Any) -> dict[str, Any]:
        """The metrics' results, after an update with a batch and its outputs unless `batch` is `None`."""
        if batch is not None:
            data, outputs = batch
            self.model.compute_metrics(**arguments_of(data, mark_outputs(outputs)))
        return dict(self.model.get_metrics_result())


def _largest(result: Any) -> float:
    return max(float(np.max(np.asarray(leaf))) for leaf in keras.tree.flatten(result))
