"""Norms, gradients, moments and sums, computed from the recorded calls of a model's units."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.per_example.calls import Call
from keras_paragrad.per_example.factored_gradients import Factors
from keras_paragrad.per_example.rule import Rule, squared_norm, zeroed
from keras_paragrad.per_example.units import Unit
from keras_paragrad.sums import row_sums_of_all


class Quantities:
    """The per-example quantities of one backward pass; the loss's scaling is still in them.

    Args:
        recorded: The units that received a gradient, with their calls.
        variables: The weights, in the order of the results.
    """

    def __init__(self, recorded: Iterable[tuple[Unit, list[Call]]], variables: Sequence[keras.Variable]):
        self.recorded = list(recorded)
        self.variables = variables
        self.places = {id(variable): place for place, variable in enumerate(variables)}
        owners = [id(v) for unit, _ in self.recorded for v in unit.rule.variables(unit.layer)]
        # Weights shared by several layers: their squared gradients can't be summed over the layers.
        self.tied = {owner for owner in owners if owners.count(owner) > 1}

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
        """As `gradients`, but as factored `Factors` where these take less memory."""
        found = self._added(self._parts("gradients_to_keep"))
        return [
            tf.zeros([self.batch, *variable.shape]) if gradient is None else gradient
            for gradient, variable in zip(found, self.variables, strict=True)
        ]

    def squared_norms(self) -> tf.Tensor:
        """The squared norm of each example's gradient over all weights, `(batch,)`, in float32."""
        squares: list[tf.Tensor] = []
        for unit, calls in self.recorded:
            keys = [id(variable) for variable in unit.rule.variables(unit.layer)]
            alone = [key in self.places and key not in self.tied for key in keys]
            if all(alone):
                squares += unit.rule.squares(calls)
            elif any(alone):
                squares += itertools.compress(unit.rule.squared_norms(calls), alone)
        by_xla = self.recorded[0][1][0].by_xla
        squares += [squared_norm(gradient, by_xla) for gradient in self._tied_gradients().values()]
        return row_sums_of_all(squares, by_xla)

    def second_moments(self) -> list[tf.Tensor]:
        """The sum over examples of squared gradients, in each weight's shape; zeros for weights without gradient."""
        parts = list(self._parts("second_moments", tied=False))
        parts += [(place, tf.reduce_sum(tf.square(g), 0)) for place, g in self._tied_gradients().items()]
        return [
            tf.zeros(variable.shape) if moment is None else moment
            for moment, variable in zip(self._added(parts), self.variables, strict=True)
        ]

    def weighted_sums(self, weights: tf.Tensor, norms: tf.Tensor | None = None) -> list[Any]:
        """The sum over examples of gradients times `weights` `(batch,)`, in each weight's shape and dtype.

        `None` where the weight has no gradient, as in plain training. An example of weight 0 contributes nothing, even
        if its gradient is not finite.

        Args:
            weights: The examples' weights.
            norms: The norms of their gradients, `(batch,)`, if these are known. Of a finite norm, 0 times the gradient
                is 0, and nothing needs to be copied.
        """
        recorded = _without_examples_of_weight_0(self.recorded, weights, norms)
        sums = self._added(self._parts("weighted_sums", weights, recorded=recorded))
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
        """Yields each weight's index and the result of a rule's method for it; tied weights only if `tied`."""
        for unit, calls in self.recorded if recorded is None else recorded:
            in_its_dtype = [tf.cast(argument, calls[0].cotangent.dtype) for argument in arguments]
            parts = getattr(unit.rule, method)(calls, *in_its_dtype)
            for variable, part in zip(unit.rule.variables(unit.layer), parts, strict=True):
                if id(variable) in self.places and (tied or id(variable) not in self.tied):
                    yield self.places[id(variable)], part

    def _tied_gradients(self) -> dict[int, tf.Tensor]:
        places = {self.places[key] for key in self.tied if key in self.places}
        added = self.gradients() if places else []
        return {place: added[place] for place in places}

    def _added(self, parts: Iterable[tuple[int, Any]]) -> list[Any]:
        found: dict[int, list] = {}
        for place, part in parts:
            found.setdefault(place, []).append(part)
        return [_sum(found[place]) if place in found else None for place in range(len(self.variables))]


def _without_examples_of_weight_0(
    recorded: Sequence[tuple[Unit, list[Call]]], weights: tf.Tensor, norms: tf.Tensor | None
) -> list[tuple[Unit, list[Call]]]:
    """The calls with all tensors zeroed for examples of weight 0, for rules that don't do so themselves."""
    of_calls = {
        id(call): call.tensors
        for unit, calls in recorded
        if type(unit.rule).weighted_sums is not Rule.weighted_sums
        for call in calls
    }
    tensors = [tensor for of_call in of_calls.values() for tensor in of_call.values()]
    if not tensors:
        return list(recorded)

    def without():
        return [zeroed(tensor, weights) for tensor in tensors]

    if recorded[0][1][0].by_xla:
        found = without()
    else:
        # Usually no example of weight 0 has a gradient that is not finite, and then nothing is copied.
        dropped = tf.equal(weights, 0)
        if norms is not None:
            dropped = tf.logical_and(dropped, tf.logical_not(tf.math.is_finite(norms)))
        found = tf.cond(tf.reduce_any(dropped), without, lambda: [tf.identity(each) for each in tensors])
    left = iter(found)
    changed = {key: {place: next(left) for place in of_call} for key, of_call in of_calls.items()}
    return [
        (unit, [call.with_tensors(changed[id(call)]) if id(call) in changed else call for call in calls])
        for unit, calls in recorded
    ]


def _sum(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return tf.add_n([tf.convert_to_tensor(Factors.of(part).materialized()) for part in parts])
