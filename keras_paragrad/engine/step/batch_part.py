"""What a part gives to its batch, and the addition of parts.

    part p      (d_p g_p, d_p, losses, effects): the gradient g_p, and the divisor d_p of its loss; all entries are sums
    p + q       the sums of the entries
    the batch   sum_p d_p g_p / sum_p d_p;  sum_p g_p, if the loss is a sum

A part has some of the batch's rows: a slice, a micro-batch of a pipeline, or a fixed part of deterministic training.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index, sum_over_replicas
from keras_paragrad.compat.optimizer import unwrap_loss_scale
from keras_paragrad.compat.types import Batch, Gradients, Scalar
from keras_paragrad.engine.batches.replica_batch import rows_of, static_row_count
from keras_paragrad.engine.calls.divided import Result, RowSlices
from keras_paragrad.engine.losses.divisors import Divisor
from keras_paragrad.engine.losses.logs import LossSums
from keras_paragrad.engine.step.gradient import Gradient, StepContext, equal_share, gradient_of
from keras_paragrad.storage.row_gradients import Lookups, accumulate_gradient, dense_if_linear, scale_gradients


class BatchPart(NamedTuple):
    """What a part gives to its batch. All entries are sums, not means, so parts add with `+`.

    Attributes:
        model: The model.
        gradients: Each trainable weight's gradient times `weight`, or `None` for a weight without a gradient.
        weight: The divisor of the part's losses, by which parts are weighted.
        losses: The numerators and denominators of the losses to log.
        effects: Nested tensors that add up too, such as changes of the states of metrics.
    """

    model: keras.Model
    gradients: Gradients
    weight: Divisor
    losses: LossSums
    effects: Any = ()

    @classmethod
    def of(
        cls, model: keras.Model, gradient: Gradient, share: Scalar | None = None, *, alike: bool = False
    ) -> "BatchPart":
        """Makes a part from a gradient whose loss was multiplied by `share` (1, if `None`).

        The weight is the divisor of the part's loss, or 1 if all parts count `alike`.
        """
        assert gradient.weight is not None, "the split stage weights every part"
        assert gradient.sums is not None, "losses of parts are not left to Keras"
        weight = tf.constant(1.0) if alike else tf.cast(gradient.weight.value, "float32")
        factor = None if alike else weight if share is None else weight / share
        pairs = zip(model.trainable_weights, gradient.gradients, strict=True)
        gradients = [each if each is None else accumulate_gradient(of, None, each, factor) for of, each in pairs]
        return cls(model, gradients, gradient.weight._replace(value=weight), gradient.sums)

    def __add__(self, other: "BatchPart") -> "BatchPart":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adds two parts. Of two float8 scales, which aren't sums, the larger one is kept."""
        pairs = zip(self.model.trainable_weights, self.gradients, other.gradients, strict=True)
        gradients = [one if two is None else accumulate_gradient(variable, one, two) for variable, one, two in pairs]
        weight = other.weight._replace(value=self.weight.value + other.weight.value)
        losses = other.losses._replace(vector=self.losses.vector + other.losses.vector)
        return BatchPart(self.model, gradients, weight, losses, _map(tf.add, self.effects, other.effects))

    @property
    def rows(self) -> list[tf.Tensor]:
        """The tensors to concatenate: gradients of embeddings, with an entry for each lookup."""
        return [tensor for each in self.gradients if isinstance(each, Lookups) for tensor in each.rows]

    @property
    def sums(self) -> list[Any]:
        """The tensors to add."""
        pieces = [each.sums if isinstance(each, Lookups) else each for each in self.gradients]
        nested = pieces, self.weight.value, self.losses.vector, self.effects
        return [tensor for tensor in keras.tree.flatten(nested) if tensor is not None]

    def with_tensors(self, sums: Iterable[Any], rows: Iterable[Any] = ()) -> "BatchPart":
        """The part with its `sums` and `rows` replaced, in the same order."""
        following, concatenated = iter(sums), iter(rows)

        def replaced(gradient: Any) -> Any:
            if isinstance(gradient, Lookups):
                return gradient.with_tensors(concatenated, following)
            return None if gradient is None else next(following)

        gradients = list(map(replaced, self.gradients))
        weight, losses = self.weight._replace(value=next(following)), self.losses._replace(vector=next(following))
        return BatchPart(self.model, gradients, weight, losses, _map(lambda _: next(following), self.effects))

    def by_replica(self) -> list["BatchPart"]:
        """The parts of all replicas, in order, on every replica. They are added to zeros, which doesn't round."""
        count, here = replica_count(), replica_index()
        rows = [
            tf.stack([tensor if replica == here else tf.zeros_like(tensor) for replica in range(count)])
            for tensor in self.sums
        ]
        gathered = [tf.unstack(row, count) for row in sum_over_replicas(rows)]
        return [self.with_tensors(sums) for sums in zip(*gathered, strict=True)]

    def finish(self) -> Gradient:
        """The gradient of the batch, from the sum of all its parts. Divides by the sum of the weights."""
        variables = self.model.trainable_weights
        divisor = tf.constant(1.0) if self.weight.summed else self.weight.value
        means: list[Any] = [
            dense_if_linear(self.model.optimizer, each.joined()) if isinstance(each, Lookups) else each
            for each in self.gradients
        ]
        if not self.weight.summed:
            means[:] = scale_gradients(means, variables, tf.math.reciprocal_no_nan(divisor))
        gradients = [
            None if mean is None else tf.cast(mean, variable.dtype)
            for mean, variable in zip(means, variables, strict=True)
        ]
        return Gradient(gradients, None, self.weight._replace(value=divisor), self.losses)


def compute_part(
    context: StepContext,
    data: Batch,
    rows: tf.Tensor | int,
    *,
    alike: bool = False,
    before: BatchPart | None = None,
    **fields: Any,
) -> BatchPart:
    """Computes the part with the rows `data` of a batch of `rows` rows; `alike` as in `BatchPart.of`.

    `fields` replace fields of the context, and `before` is the part before this one.
    """
    share, model = None, context.model
    if scales_loss(model):
        share = tf.cast(rows_of(data), "float32") / tf.cast(rows, "float32")
        fields["weigh_replica"] = lambda weight: equal_share(weight) * share
    part = BatchPart.of(model, gradient_of(context, data, **fields), share, alike=alike)
    size, earlier = static_row_count(data), before.gradients if before else [None] * len(part.gradients)
    gradients = [
        Lookups.of_part(gradient, variable, model.optimizer, size, last)
        for gradient, variable, last in zip(part.gradients, model.trainable_weights, earlier, strict=True)
    ]
    return part._replace(gradients=gradients)


def scales_loss(model: keras.Model) -> bool:
    """Whether the optimizer scales the loss. A part's scaled mean may overflow where the batch's doesn't."""
    return model.optimizer is not None and unwrap_loss_scale(model.optimizer) is not model.optimizer


def sum_slices(context: StepContext, data: Batch, slices: RowSlices, rows: tf.Tensor | int, **how: Any) -> BatchPart:
    """The sum of the slices of a batch of `rows` rows; `how` as in `compute_part`."""
    leaves = keras.tree.flatten(data)
    present = [leaf for leaf in leaves if leaf is not None]
    # The slice that was traced last. The sum of all slices has the same structure.
    traced: list[BatchPart] = []

    def compute(some: list[Any], whole: list[Any], state: list[Any]) -> Result:
        following = iter(some)
        of_slice = [None if leaf is None else next(following) for leaf in leaves]
        of_slice, before = keras.tree.pack_sequence_as(data, of_slice), traced[0] if traced else None
        traced[:] = [compute_part(context, of_slice, rows, before=before, in_loop=True, **how)]
        return Result(traced[0].rows, traced[0].sums, [])

    def add(one: list[Any], other: list[Any]) -> list[Any]:
        added = [each._replace(by_example=None) if isinstance(each, Lookups) else each for each in traced[0].gradients]
        form = traced[0]._replace(gradients=added)
        return (form.with_tensors(one) + form.with_tensors(other)).sums

    result, _ = slices._replace(add=add).run(compute, present, [], [], None)
    return traced[0].with_tensors(result.sums, result.rows)


def _map(function: Callable[..., Any], *nested: Any) -> Any:
    """Maps nested tensors, and keeps each `None`."""
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *nested)
