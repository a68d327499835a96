"""Norms, gradients, moments and sums, computed from the recorded calls of a model's units.

A unit is a layer with weights, whose per-example gradients one rule computes.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.types import GradientTensor
from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.rule import Factors, Rule, squared_norm, zeroed
from keras_paragrad.per_example.units import Unit
from keras_paragrad.sums import row_sums_of_all


class Quantities:
    """The per-example quantities of one backward pass, scaled as the loss is.

    Args:
        recorded: The units that received a gradient, with their calls.
        variables: The weights, in the order of the results.

    Attributes:
        indices: The index of each weight in `variables`, by `id`.
        tied: The `id`s of weights that several units use, whose squared gradients can't be summed over the units.
    """

    def __init__(self, recorded: Iterable[tuple[Unit, list[Call]]], variables: Sequence[keras.Variable]):
        self.recorded = list(recorded)
        self.variables = variables
        self.indices = {id(variable): index for index, variable in enumerate(variables)}
        keys = [id(v) for unit, _ in self.recorded for v in unit.rule.variables(unit.layer)]
        self.tied = {key for key in keys if keys.count(key) > 1}

    @property
    def batch(self) -> tf.Tensor:
        """The number of examples, a scalar."""
        cotangents = self.recorded[0][1][0].cotangents
        assert cotangents is not None
        return tf.shape(cotangents[0])[0]

    def gradients(self) -> list[tf.Tensor]:
        """The per-example gradients of each weight, `(batch, *shape)`; zeros where the weight has no gradient."""
        return [Factors.of(gradient).materialized() for gradient in self.gradients_to_keep()]

    def gradients_to_keep(self) -> list[Any]:
        """Like `gradients`, but as `Factors` where these take less memory."""
        gradients = self._add(self._parts("gradients_to_keep"))
        return [
            tf.zeros([self.batch, *variable.shape]) if gradient is None else gradient
            for gradient, variable in zip(gradients, self.variables, strict=True)
        ]

    def squared_norms(self) -> tf.Tensor:
        """The squared norm of each example's gradient over all weights, `(batch,)`, in float32."""
        squares: list[tf.Tensor] = []
        for unit, calls in self.recorded:
            keys = [id(variable) for variable in unit.rule.variables(unit.layer)]
            untied = [key in self.indices and key not in self.tied for key in keys]
            if all(untied):
                squares += unit.rule.squared_norms(calls)
            elif any(untied):
                gradients = itertools.compress(unit.rule.gradients_of_all(calls), untied)
                squares += [squared_norm(gradient, calls[0].by_xla) for gradient in gradients]
        by_xla = self.recorded[0][1][0].by_xla
        squares += [squared_norm(gradient, by_xla) for gradient in self._tied_gradients().values()]
        return row_sums_of_all(squares, by_xla)

    def second_moments(self) -> list[tf.Tensor]:
        """The sum over examples of squared gradients, in each weight's shape; zeros for weights without gradient."""
        parts = list(self._parts("second_moments", tied=False))
        parts += [(index, tf.reduce_sum(tf.square(g), 0)) for index, g in self._tied_gradients().items()]
        return [
            tf.zeros(variable.shape) if moment is None else moment
            for moment, variable in zip(self._add(parts), self.variables, strict=True)
        ]

    def weighted_sums(self, weights: tf.Tensor, norms: tf.Tensor | None = None) -> list[GradientTensor | None]:
        """The sum over examples of gradients times `weights` `(batch,)`, in each weight's shape and dtype.

        `None` where the weight has no gradient, as in plain training. An example of weight 0 contributes nothing, even
        if its gradient is not finite.

        Args:
            weights: The examples' weights.
            norms: The norms of their gradients, `(batch,)`, if known: gradients of a finite norm need no zeroing.
        """
        recorded = _zero_examples_of_weight_0(self.recorded, weights, norms)
        sums = self._add(self._parts("weighted_sums", weights, recorded=recorded))
        return [
            None if total is None else tf.cast(total, variable.dtype)
            for total, variable in zip(sums, self.variables, strict=True)
        ]

    def _parts(
        self,
        method: str,
        *arguments: tf.Tensor,
        tied: bool = True,
        recorded: Sequence[tuple[Unit, list[Call]]] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yields each weight's index and the result of a rule's method for it; without tied weights unless `tied`.

        A weight of several units occurs once for each. `recorded` replaces the recorded calls.
        """
        for unit, calls in self.recorded if recorded is None else recorded:
            cast = [tf.cast(argument, calls[0].cotangent.dtype) for argument in arguments]
            parts = getattr(unit.rule, method)(calls, *cast)
            for variable, part in zip(unit.rule.variables(unit.layer), parts, strict=True):
                if id(variable) in self.indices and (tied or id(variable) not in self.tied):
                    yield self.indices[id(variable)], part

    def _tied_gradients(self) -> dict[int, tf.Tensor]:
        """The per-example gradients of the tied weights, by index."""
        indices = {self.indices[key] for key in self.tied if key in self.indices}
        gradients = self.gradients() if indices else []
        return {index: gradients[index] for index in indices}

    def _add(self, parts: Iterable[tuple[int, Any]]) -> list[Any]:
        """The sum of each weight's parts, which come with its index; `None` for a weight without parts."""
        by_index: dict[int, list[Any]] = {}
        for index, part in parts:
            by_index.setdefault(index, []).append(part)
        return [_sum(by_index[index]) if index in by_index else None for index in range(len(self.variables))]


def _zero_examples_of_weight_0(
    recorded: Sequence[tuple[Unit, list[Call]]], weights: tf.Tensor, norms: tf.Tensor | None
) -> list[tuple[Unit, list[Call]]]:
    """The calls with all tensors zeroed for examples of weight 0.

    Only for rules that override `weighted_sums`: the default zeroes the gradients itself.
    """
    tensors_of = {
        id(call): call.tensors
        for unit, calls in recorded
        if type(unit.rule).weighted_sums is not Rule.weighted_sums
        for call in calls
    }
    flat = [tensor for tensors in tensors_of.values() for tensor in tensors.values()]
    if not flat:
        return list(recorded)

    def zero_all():
        return [zeroed(tensor, weights) for tensor in flat]

    if recorded[0][1][0].by_xla:
        results = iter(zero_all())
    else:
        # Usually no example of weight 0 has a gradient that is not finite, and then nothing is copied.
        dropped = tf.equal(weights, 0)
        if norms is not None:
            dropped = tf.logical_and(dropped, tf.logical_not(tf.math.is_finite(norms)))
        results = iter(tf.cond(tf.reduce_any(dropped), zero_all, lambda: [tf.identity(tensor) for tensor in flat]))
    replaced = {key: {index: next(results) for index in tensors} for key, tensors in tensors_of.items()}
    return [
        (unit, [call.with_tensors(replaced[id(call)]) if id(call) in replaced else call for call in calls])
        for unit, calls in recorded
    ]


def _sum(parts: list[Any]) -> Any:
    """The sum of tensors or `Factors`; a single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return tf.add_n([tf.convert_to_tensor(Factors.of(part).materialized()) for part in parts])
