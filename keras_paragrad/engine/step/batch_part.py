"""What a part of a batch adds to the whole. Slices, fixed parts and replicas are orders of one addition."""

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
    """What a part of a batch adds to the whole: sums, never means. `one + other` is what both add.

    Attributes:
        model: The model.
        gradients: For each trainable weight, its gradient times `weight`, or `None` if there is none.
        weight: What the losses of the part are divided by.
        losses: The losses.
        effects: Changes of states, nested, which add up too.
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
        """The part with a gradient, whose loss was multiplied by `share`; with weight 1, if all parts count `alike`."""
        assert gradient.weight is not None, "the split stage weights every part"
        assert gradient.sums is not None, "losses of parts are not left to Keras"
        weight = tf.constant(1.0) if alike else tf.cast(gradient.weight.value, "float32")
        factor = None if alike else weight if share is None else weight / share
        gradients = weigh(model, gradient.gradients, factor)
        return cls(model, gradients, gradient.weight._replace(value=weight), gradient.sums)

    def __add__(self, other: "BatchPart") -> "BatchPart":  # pyright: ignore[reportIncompatibleMethodOverride]
        """What both parts add; of float8 scales, which are no sums, the larger one."""
        pairs = zip(self.model.trainable_weights, self.gradients, other.gradients, strict=True)
        gradients = [one if two is None else accumulate_gradient(variable, one, two) for variable, one, two in pairs]
        weight = other.weight._replace(value=self.weight.value + other.weight.value)
        losses = other.losses._replace(vector=self.losses.vector + other.losses.vector)
        return BatchPart(self.model, gradients, weight, losses, _map(tf.add, self.effects, other.effects))

    @property
    def sums(self) -> list[Any]:
        """The tensors that add up."""
        return [each for each in keras.tree.flatten(self._nested) if each is not None]

    def with_sums(self, sums: Sequence[Any]) -> "BatchPart":
        """The part with other `sums`."""
        following = iter(sums)
        gradients, weight, losses, effects = _map(lambda _: next(following), self._nested)
        weight, losses = self.weight._replace(value=weight), self.losses._replace(vector=losses)
        return BatchPart(self.model, gradients, weight, losses, effects)

    @property
    def _nested(self) -> tuple[Any, ...]:
        return list(self.gradients), self.weight.value, self.losses.vector, self.effects

    def by_replica(self) -> list["BatchPart"]:
        """The parts of all replicas, in order, on each of them: a sum with zeros moves bits and changes none."""
        count, here = replica_count(), replica_index()
        rows = [
            tf.stack([each if replica == here else tf.zeros_like(each) for replica in range(count)])
            for each in self.sums
        ]
        gathered = [tf.unstack(each, count) for each in sum_over_replicas(rows)]
        return [self.with_sums(sums) for sums in zip(*gathered, strict=True)]

    def finish(self) -> Gradient:
        """The gradient of the whole, which has been summed over all parts: its one division."""
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
    """Computes a slice of a batch of so many rows; `fields` replace those of the context, `alike` is as in `of`."""
    share, model = None, context.model
    if scales_loss(model):
        share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")
        fields["weigh_replica"] = lambda weight: equal_share(weight) * share
    return BatchPart.of(model, gradient_of(context, data, **fields), share, alike=alike)


def scales_loss(model: keras.Model) -> bool:
    """Whether gradients are scaled up: a mean over a part is larger than over the batch, and could overflow."""
    return model.optimizer is not None and unwrap_loss_scale(model.optimizer) is not model.optimizer


def weigh(model: keras.Model, gradients: Gradients, factor: Scalar | None = None) -> list[Any]:
    """Gradients times a factor, in the dtypes in which they are summed."""
    pairs = zip(model.trainable_weights, gradients, strict=True)
    return [None if each is None else accumulate_gradient(variable, None, each, factor) for variable, each in pairs]


def sum_in_loop(model: keras.Model, count: tf.Tensor | int, compute: Callable[[tf.Tensor], BatchPart]) -> BatchPart:
    """The sum of `count` parts, at least one where no graph is traced; `compute` maps the index of one to it."""
    variables = model.trainable_weights
    zeros = [tf.zeros(variable.shape, sum_dtype(variable)) for variable in variables]
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
    return total._replace(gradients=[None if gradient is None else each for gradient, each in present])


def _map(function: Callable[..., Any], *nested: Any) -> Any:
    """Maps nested tensors; leaves `None` as it is."""
    return keras.tree.map_structure(lambda *each: None if each[0] is None else function(*each), *nested)
