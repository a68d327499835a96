"""The window, the micro-batches of one update: how many it has, and each replica's weighted sum of their gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.arguments import (
    check_choice,
    check_choice_or_function,
    check_flag,
    check_integer,
    quote,
    refusal,
)
from keras_paragrad.compat.optimizer import WrappingOptimizer
from keras_paragrad.compat.types import GradientTensor
from keras_paragrad.compat.variables import SavedVariables
from keras_paragrad.engine.losses.divisors import PARAMETERS, DivisorFunction
from keras_paragrad.engine.step.apply import Contribution
from keras_paragrad.storage.row_gradients import is_overwritten, scale_gradient
from keras_paragrad.storage.storage import reduce_replicated_gradients, storage_of

Steps = int | Sequence[Sequence[int]]
_EXPECTED = "an integer of at least 1, or pairs of (first update, steps) such as [(0, 2), (100, 8)]"


class StepsSchedule:
    """The number of micro-batches in the window that ends with a given update.

    Args:
        steps: An integer; or pairs `(first_update, steps)` in ascending order, starting at update 0.

    Raises:
        ValueError: The schedule is empty, unsorted or does not begin at 0, or has other numbers of steps than integers
            of at least 1.

    Attributes:
        steps: The steps as plain integers, for a config.
    """

    def __init__(self, steps: Steps):
        self._pairs = _check_pairs(steps)
        self.steps: Steps = self._pairs if isinstance(steps, (list, tuple)) else self._pairs[0][1]

    @property
    def is_constant(self) -> bool:
        """Whether every update takes the same number of micro-batches."""
        return len(self._pairs) == 1

    @property
    def is_always_one(self) -> bool:
        """Whether every update takes a single micro-batch."""
        return self.is_constant and self.at(0) == 1

    def __call__(self, update: tf.Tensor) -> tf.Tensor:
        """The steps of the window that ends with `update`, as an int64 scalar; can be traced."""
        update = tf.cast(tf.convert_to_tensor(update), tf.int64)
        steps = tf.constant(self._pairs[0][1], tf.int64)
        for first, count in self._pairs[1:]:
            steps = tf.where(update >= first, tf.constant(count, tf.int64), steps)
        return steps

    def at(self, update: int) -> int:
        """The steps as a Python integer, for the host."""
        return next(count for first, count in reversed(self._pairs) if update >= first)


def _check_pairs(steps: object) -> list[tuple[int, int]]:
    """Validates steps; returns them as pairs `(first update, steps)`."""
    listed = steps if isinstance(steps, (list, tuple)) else [(0, steps)]
    try:
        pairs = [(check_integer("steps", first, least=0), check_integer("steps", count)) for first, count in listed]
    except (TypeError, ValueError):  # not pairs, or not integers
        pairs = []
    if not pairs:
        raise refusal("steps", steps, _EXPECTED, "4")
    firsts = [first for first, _ in pairs]
    if firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ValueError(
            f"`steps` changes at updates {quote(firsts)}, which must start at 0 and increase. "
            f"Write steps={sorted({0: pairs[0][1], **dict(pairs)}.items())}."
        )
    return pairs


WEIGHTINGS = ("auto", "uniform", "examples", "sample_weight", "mask", "sum")
TAILS = ("flush", "carry", "drop")
ACCUMULATOR_DTYPES = ("float32", "float64", "bfloat16", "float16", None)


class WindowOptions(NamedTuple):
    """The arguments of an `AccumulatingOptimizer`, beside the optimizer that it wraps."""

    steps: Steps = 1
    weighting: str | DivisorFunction = "auto"
    tail: str = "flush"
    accumulator_dtype: str | None = "float32"
    skip_nonfinite: bool = False

    @classmethod
    def checked(cls, *arguments: Any) -> "WindowOptions":
        """Checks the arguments, in this order."""
        steps, weighting, tail, accumulator_dtype, skip_nonfinite = arguments
        return cls(
            StepsSchedule(steps).steps,
            check_choice_or_function("weighting", weighting, WEIGHTINGS, PARAMETERS),
            check_choice("tail", tail, TAILS),
            check_choice("accumulator_dtype", accumulator_dtype, ACCUMULATOR_DTYPES),
            check_flag("skip_nonfinite", skip_nonfinite),
        )

    def as_keywords(self) -> dict[str, Any]:
        """The arguments, by name."""
        return self._asdict()

    @property
    def described(self) -> str:
        """The arguments that aren't the default ones, as they are typed."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self.as_keywords().items() if value != self._field_defaults[name]
        )


class GradientWindow(SavedVariables):
    """Accumulators for the gradients of an optimizer's variables.

    All methods but the constructor run in replica context and touch only that replica's state. Variables are known by
    their index in the optimizer's `trainable_variables`.

    Args:
        optimizer: The optimizer, already built.
        dtype: The accumulators' dtype, or `None` for each variable's dtype.

    Attributes:
        position: The number of micro-batches since the last update.
        weight: The sum of the micro-batches' weights, by which an update divides the sums of their gradients.
        accumulators: The weighted sum of gradients of each variable.
        overwrites: For each variable, whether its gradient is its new value, as of float8 scales.
    """

    _replaced: set[int]
    _added: set[int]

    def __init__(self, optimizer: WrappingOptimizer, dtype: str | None):
        super().__init__()
        # The indices of accumulators that a gradient may replace, or is only added to, in any trace. Bypass tracking.
        self.__dict__.update(_replaced=set(), _added=set())
        variables = optimizer.trainable_variables
        self.overwrites = [is_overwritten(variable) for variable in variables]
        self.position = self.add("position", dtype="int64")
        self.weight = self.add("weight", local=True, aggregation="sum")
        # Outer optimizers, such as a LossScaleOptimizer, then pass its "gradient", a `Contribution`, on unchanged.
        self.weight.overwrite_with_gradient = True
        # The accumulator of a variable that its gradient overwrites holds the largest gradient. It is the same on all
        # replicas, and must not be summed when saved.
        self.accumulators = [
            self.add(
                f"accumulator_{index}",
                variable.shape,
                variable.dtype if overwrites or dtype is None else dtype,
                aggregation="mean" if overwrites else "sum",
                # The accumulator of a sharded variable is sharded too, and holds the sum over all replicas.
                local=not storage_of(variable).divided,
                like=variable,
            )
            for index, (variable, overwrites) in enumerate(zip(variables, self.overwrites, strict=True))
        ]

    def add_gradients(
        self,
        indices: Sequence[int],
        gradients: Sequence[GradientTensor],
        contribution: tf.Tensor | None,
        *,
        drop_nonfinite: bool,
    ) -> None:
        """Adds a micro-batch's gradients, of the variables with some indices, or starts a window with them.

        Args:
            contribution: Their `Contribution` as a tensor; if `None`, all micro-batches have the same.
            drop_nonfinite: Whether to skip the micro-batch if any gradient is infinite or NaN.
        """
        parts = Contribution.of(None) if contribution is None else Contribution(*tf.unstack(contribution, 3))
        scale = None if contribution is None else parts.scale
        before = tf.convert_to_tensor(self.weight.value)
        # A weight of +0.0 marks a cleared window, whose stale sums are replaced. A begun one of weight zero gets -0.0
        # below, whose reciprocal is -inf.
        first = tf.equal(tf.math.reciprocal(before), float("inf"))
        finite = None
        if drop_nonfinite:
            dense = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in dense])
        # With data of unknown length, a counter must not advance for a batch that turns out not to exist.
        with tf.control_dependencies(None if tf.executing_eagerly() else gradients):
            weight = before * parts.decay + parts.weight
            weight = tf.where(tf.equal(weight, 0.0), -tf.abs(weight), weight)
            if finite is not None:
                weight = tf.where(finite, weight, before)
            self.weight.value.assign(weight)
        storages = [storage_of(accumulator) for accumulator in self.accumulators]
        pairs = zip(indices, gradients, strict=True)
        replaced = {
            index
            for index, gradient in pairs
            if storages[index].replaces and not isinstance(gradient, tf.IndexedSlices)
        }
        added = set(indices) - replaced
        for index, storage in enumerate(storages):
            # Stale are sums that this trace leaves alone, or adds to while another trace replaces them. Sums that are
            # only ever added to are cleared by each update: adding single rows must not touch the others.
            if index not in replaced and (index not in added or index in self._replaced):
                storage.reset(first)
        self._replaced |= replaced
        self._added |= added
        for index, gradient in zip(indices, gradients, strict=True):
            target = storages[index].local
            sparse = isinstance(gradient, tf.IndexedSlices)
            values = tf.cast(gradient.values if sparse else gradient, target.dtype)
            if finite is not None:
                values = tf.where(finite, values, tf.zeros_like(values))
            if self.overwrites[index]:
                target.assign(tf.maximum(tf.where(first, tf.zeros_like(values), target), values))
            else:
                summand = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if sparse else values
                storages[index].accumulate(summand, scale, first)

    def mean(self, indices: Sequence[int], variables: Sequence[keras.Variable]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The mean gradient of the window over all replicas, in one reduction, and the weight that it is divided by.

        It is of the variables that have a gradient, and have these indices.
        """
        # Without tf.identity, a multi-worker strategy can't place variables that are used inside a conditional.
        sums = [tf.identity(storage_of(self.accumulators[index]).local) for index in indices]
        averaged = [position for position, index in enumerate(indices) if not self.overwrites[index]]
        totals, (weight,) = reduce_replicated_gradients(
            [sums[position] for position in averaged],
            [variables[position] for position in averaged],
            [tf.identity(self.weight.value)],
        )
        # One reciprocal, then multiplications: TensorFlow's `div_no_nan` of a tensor is several times slower.
        factor = tf.math.reciprocal_no_nan(weight)
        for position, total in zip(averaged, totals, strict=True):
            sums[position] = scale_gradient(total, factor)
        return sums, weight

    def clear(self) -> None:
        """Clears this replica's window. Sums that only get replaced are left to the next gradients."""
        self.weight.value.assign(0.0)
        for index, accumulator in enumerate(self.accumulators):
            if index not in self._replaced - self._added:
                storage_of(accumulator).reset(True)
