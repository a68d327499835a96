"""A part's contribution to its batch, and the addition of parts.

A part has some of the batch's rows: a slice, a micro-batch of a pipeline, or a fixed part of deterministic training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.optimizer import say_rows_are_summed, unwrap_loss_scale
from keras_paragrad.compat.types import Batch, Gradients, Scalar
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.sums import LossSums, zero_sums
from keras_paragrad.engine.replicas.replica_batch import rows_of
from keras_paragrad.engine.step.gradient import Gradient, StepContext, equal_share, gradient_of
from keras_paragrad.storage.row_gradients import accumulate_gradient, scale_gradients, sum_dtype


class BatchPart(NamedTuple):
    """A part's contribution to its batch: sums, never means, so parts add with `+`.

    Attributes:
        model: The model.
        gradients: For each trainable weight, its gradient times `weight`, or `None` if there is none.
        weight: The divisor of the part's losses, by which parts are weighted.
        losses: The numerators and denominators of the losses to log.
        effects: Nested tensors that add up too, such as changes of the states of metrics.
    """

    model: keras.Model
    gradients: Gradients
    weight: Normalizer
    losses: LossSums
    effects: Any = ()

    @classmethod
    def of(
        cls, model: keras.Model, gradient: Gradient, share: Scalar | None = None, *, alike: bool = False
    ) -> "BatchPart":
        """Makes a part from the gradient of its loss times `share` (1, if `None`).

        If all parts count `alike`, its weight is 1, and otherwise the divisor of its loss.
        """
        assert gradient.weight is not None, "the split stage weights every part"
        assert gradient.sums is not None, "losses of parts are not left to Keras"
        weight = tf.constant(1.0) if alike else tf.cast(gradient.weight.value, "float32")
        factor = None if alike else weight if share is None else weight / share
        gradients = weigh(model, gradient.gradients, factor)
        return cls(model, gradients, gradient.weight._replace(value=weight), gradient.sums)

    def __add__(self, other: "BatchPart") -> "BatchPart":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adds two parts; keeps the larger of two float8 scales, which aren't sums."""
        pairs = zip(self.model.trainable_weights, self.gradients, other.gradients, strict=True)
        gradients = [one if two is None else accumulate_gradient(variable, one, two) for variable, one, two in pairs]
        weight = other.weight._replace(value=self.weight.value + other.weight.value)
        losses = other.losses._replace(vector=self.losses.vector + other.losses.vector)
        return BatchPart(self.model, gradients, weight, losses, _map(tf.add, self.effects, other.effects))

    @property
    def sums(self) -> list[Any]:
        """The tensors that add up."""
        return [tensor for tensor in keras.tree.flatten(self._nested) if tensor is not None]

    def with_sums(self, sums: Sequence[Any]) -> "BatchPart":
        """The part with these tensors in place of its `sums`, in the same order."""
        following = iter(sums)
        gradients, weight, losses, effects = _map(lambda _: next(following), self._nested)
        weight, losses = self.weight._replace(value=weight), self.losses._replace(vector=losses)
        return BatchPart(self.model, gradients, weight, losses, effects)

    @property
    def _nested(self) -> tuple[Any, ...]:
        return list(self.gradients), self.weight.value, self.losses.vector, self.effects

    def by_replica(self) -> list["BatchPart"]:
        """Gathers the parts of all replicas, in order, on every replica: by sums with zeros, which don't round."""
        count, here = replica_count(), replica_index()
        rows = [
            tf.stack([tensor if replica == here else tf.zeros_like(tensor) for replica in range(count)])
            for tensor in self.sums
        ]
        gathered = [tf.unstack(row, count) for row in sum_over_replicas(rows)]
        return [self.with_sums(sums) for sums in zip(*gathered, strict=True)]

    def finish(self) -> Gradient:
        """The gradient of the batch, if this part is the sum of all its parts; divided by their weights' sum."""
        variables = self.model.trainable_weights
        divisor = tf.constant(1.0) if self.weight.summed else self.weight.value
        means: Sequence[Any] = self.gradients
        if not self.weight.summed:
            means = scale_gradients(means, variables, tf.math.reciprocal_no_nan(divisor))
        gradients = [
            None if mean is None else tf.cast(mean, variable.dtype)
            for mean, variable in zip(means, variables, strict=True)
        ]
        return Gradient(gradients, None, self.weight._replace(value=divisor), self.losses)


def compute_part(
    context: StepContext, data: Batch, rows: tf.Tensor | int, *, alike: bool = False, **fields: Any
) -> BatchPart:
    """Computes a part, with rows `data`, of a batch of `rows` rows.

    `fields` replace fields of the context, and `alike` is as in `BatchPart.of`.
    """
    share, model = None, context.model
    if scales_loss(model):
        share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")
        fields["weigh_replica"] = lambda weight: equal_share(weight) * share
    return BatchPart.of(model, gradient_of(context, data, **fields), share, alike=alike)


def scales_loss(model: keras.Model) -> bool:
    """Whether gradients have a loss scale: a mean over a part is larger than over the batch, and could overflow."""
    return model.optimizer is not None and unwrap_loss_scale(model.optimizer) is not model.optimizer


def weigh(model: keras.Model, gradients: Gradients, factor: Scalar | None = None) -> list[Any]:
    """Casts gradients to the dtypes in which they are summed, and multiplies them by a factor, if any."""
    pairs = zip(model.trainable_weights, gradients, strict=True)
    return [
        None if gradient is None else accumulate_gradient(variable, None, gradient, factor)
        for variable, gradient in pairs
    ]


def sum_in_loop(model: keras.Model, count: tf.Tensor | int, compute: Callable[[tf.Tensor], BatchPart]) -> BatchPart:
    """Sums `compute(index)` over `count` parts; `count` is at least 1 outside of a graph."""
    variables = model.trainable_weights
    zeros = [tf.zeros(variable.shape, sum_dtype(variable)) for variable in variables]
    # The part traced in the loop: it has the form of the sums, and `None` where a weight has no gradient.
    parts: list[BatchPart] = []

    def add(index: tf.Tensor, sums: Sequence[Any]) -> tuple[tf.Tensor, list[Any]]:
        part = compute(index)
        say_rows_are_summed(model.optimizer, part.gradients, variables)
        parts[:] = [part]
        return index + 1, (part._replace(gradients=zeros).with_sums(sums) + part).sums

    start = tf.constant(0), [*zeros, tf.constant(0.0), zero_sums(model)]
    sums = tf.while_loop(lambda index, _: index < count, add, start, parallel_iterations=1)[1]
    (part,) = parts
    total = part._replace(gradients=zeros).with_sums(sums)
    present = zip(part.gradients, total.gradients, strict=True)
    return total._replace(gradients=[None if gradient is None else summed for gradient, summed in present])


def _map(function: Callable[..., Any], *nested: Any) -> Any:
    """Maps nested tensors; leaves `None` as it is."""
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *nested)
