"""`microbatch`: runs a large batch in slices inside the compiled step.

A `StepBuilder` makes the model's training step from *stages*. `Slices`, which fills its *split* stage, cuts each batch.
"""

import warnings
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.accumulation.window import WEIGHTINGS
from keras_paragrad.arguments import check_choice_or_function, check_flag, check_instance, check_integer, check_parts
from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.batches.replica_batch import cut_rows_of, rows_at, static_row_count
from keras_paragrad.engine.calls.divided import RowSlices
from keras_paragrad.engine.losses.dividers import Divider, warn_of_batch_statistics
from keras_paragrad.engine.losses.divisors import PARAMETERS, DivisorFunction
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.step.batch_part import sum_slices
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.step.fixed_parts import FixedParts
from keras_paragrad.engine.step.gradient import Gradient, StepContext
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.trial import PreparationCall

DIVIDER = Divider(
    configured_by="microbatch",
    parts="the slices of a batch",
    for_equal_parts="write AccumulatingOptimizer(..., weighting='uniform'), and give fit() the micro-batches",
    to_train_anyway="write microbatch(..., weighting='examples')",
    divides_calls=True,
    divides_steps=True,
)


class microbatch:  # noqa: N801  (used as a function and as a context manager, like contextlib's own)
    """Makes `fit` run each batch in slices of `size` examples, in the memory of one slice.

    Training is unchanged, with one update per batch: losses and gradients are averaged over the slices, weighted by
    their divisors, and metrics see every example. The slices run sequentially inside the compiled step, with
    `jit_compile`, `steps_per_execution` and strategies; under a strategy, each replica slices its batch.

    Args:
        model: A model, compiled or not yet.
        size: The maximum number of examples in a slice, per replica. The last slice of a batch holds the rest.
        weighting: What the loss of a slice is divided by. `"auto"` reads it off Keras's losses, and computes others on
            whole batches; `"examples"`, `"sample_weight"`, `"mask"`, `"sum"` or a function of `(x, y, y_pred,
            sample_weight)` states it, which is faster. See `AccumulatingOptimizer`.
        prove: Whether the first batch proves, before its update and before each epoch, that slices give the gradient of
            the whole; if they don't, the loss is computed on whole batches. What Keras itself defines, and is known to
            divide, isn't computed again.
        deterministic: The number of parts, 8 for `True`, that every batch is computed in, of at most `size` rows each.
            Their gradients, losses and metrics are added in a fixed order, so that weights are the same to the last bit
            as with `DistributedFit(deterministic=...)` on any number of devices. A loss that isn't Keras's then needs a
            `weighting`, unless it returns one value per example.

    Returns:
        A handle: `undo()`, or leaving a `with` block, restores the model's own training step.

    Raises:
        ValueError: `size` isn't an integer of at least 1, or the model runs in a pipeline. `fit` raises it if a batch
            has more than `size` examples, and neither its loss nor a call of a layer can be divided. The message says
            what to write. Smaller batches are trained on whole.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import microbatch
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> with microbatch(model, size=64):
    ...     history = model.fit(np.ones((1000, 8)), np.ones((1000, 1)), batch_size=500, verbose=0)
    >>> int(model.optimizer.iterations)
    2
    """

    def __init__(
        self,
        model: keras.Model,
        size: int,
        *,
        weighting: str | DivisorFunction = "auto",
        prove: bool = True,
        deterministic: bool | int = False,
    ):
        check_instance("model", model, keras.Model, "a Keras model")
        check_flag("prove", prove)
        size = check_integer("size", size, most=2**31 - 1, example=64)
        # Slices of a batch are weighted by their divisors, never uniformly.
        choices = [name for name in WEIGHTINGS if name != "uniform"]
        loss_divisor = LossDivisor(check_choice_or_function("weighting", weighting, choices, PARAMETERS), DIVIDER)
        builder = StepBuilder.of(model)
        parts = check_parts(deterministic)
        if not isinstance(builder.stages.split, Slices | FixedParts | None):
            raise ValueError(
                f"The batches of {model.name!r} are cut into micro-batches already, by the pipeline that it was "
                "prepared for. Leave microbatch out, and write Pipeline(..., microbatches=...)."
            )
        if (before := builder.stages.split) is not None and not getattr(before, "planned", False):
            warnings.warn(
                f"This microbatch takes the place of an earlier one of {model.name!r} with size={before.size}, which "
                "undo() doesn't restore. Write handle = microbatch(...), and handle.undo() before the next one.",
                stacklevel=2,
            )
        warn_of_batch_statistics(model)
        self.model = model
        split: Slices | FixedParts = Slices(size, loss_divisor, prove)
        if parts:
            on_replicas = f"Write DistributedFit(..., deterministic={parts}), and dist.fit(model, ...)."
            split = FixedParts(parts, loss_divisor, prove, size, for_replicas=on_replicas)
            # The same bits in each run of this process.
            tf.config.experimental.enable_op_determinism()
        builder.fill(split=split)

    def undo(self) -> None:
        """Restores the model's own training step."""
        StepBuilder.of(self.model).fill(split=None)

    def __enter__(self) -> "microbatch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class Slices(NamedTuple):
    """Fills the *split* stage with slices of a known size.

    Attributes:
        size: The maximum number of examples in a slice.
        loss_divisor: Computes the weight of a slice: the divisor of its loss.
        prove: Whether the first batch is to prove that its slices give what it gives.
        planned: Whether a plan of what fits has chosen them, which the user's own replace without a word.
    """

    size: int
    loss_divisor: LossDivisor
    prove: bool = True
    planned: bool = False

    def as_planned(self) -> "Slices":
        """The same, chosen by a plan."""
        return self._replace(planned=True)

    @property
    def preparation(self) -> PreparationCall:
        """The call that fills the stage, for the process of a trial to repeat."""
        return PreparationCall(__name__, "microbatch", {"size": self.size, "weighting": self.loss_divisor.weighting})

    @property
    def refusal_prefix(self) -> str:
        """The first sentence of the error for a batch that can't be cut."""
        return f"A batch has more than size={self.size} examples, and can't be split into slices."

    def part_rows(self, rows: int) -> int:
        """The number of rows of a slice of a batch."""
        return min(rows, self.size)

    def cuts(self, data: Batch) -> bool | None:
        """Whether a batch has more examples than a slice; `None` if its size isn't static."""
        rows = static_row_count(data)
        return None if rows is None else rows > self.size

    @property
    def refusal_of_calls(self) -> None:
        """Calls of layers can be divided."""

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """The gradient of a batch, accumulated over slices of `size` rows; the last one may be smaller."""
        self.build(context, data)
        in_xla = bool(context.model.jit_compile) and replica_count() == 1 and not context.by_xla
        return sum_slices(context, data, RowSlices(self.size, in_xla=in_xla), cut_rows_of(data)).finish()

    def build(self, context: StepContext, data: Batch) -> None:
        """Builds the model's weights and losses, outside of the loop over slices."""
        if not context.model.built:
            context.model(keras.utils.unpack_x_y_sample_weight(rows_at(data, 0, 1))[0])
        build_losses(context.model, rows_at(data, 0, 1))
