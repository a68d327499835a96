"""`microbatch`: runs a large batch in slices inside the compiled step.

A `StepBuilder` makes the model's training step from *stages*. The fillers of its *split* stage here, `Slices` and
`UnchosenSlices`, cut each batch.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras

from keras_paragrad.accumulation.advice import SLICE_WEIGHTINGS, check_parts
from keras_paragrad.arguments import check_choice_or_function, check_flag, check_instance, check_integer
from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.compat.data import Adapter, sample_rows
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.batches.replica_batch import cut_rows_of, rows_at, static_row_count
from keras_paragrad.engine.calls.divided import RowSlices
from keras_paragrad.engine.losses.dividers import Divider
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import warn_of_batch_statistics
from keras_paragrad.engine.losses.weightings import PARAMETERS, DivisorFunction
from keras_paragrad.engine.step.batch_part import sum_slices
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.step.fixed_parts import FixedParts, enable_determinism
from keras_paragrad.engine.step.gradient import Gradient, StepContext
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.available import memory_of_device
from keras_paragrad.memory.batch_size import (
    ROWS,
    TrialLog,
    check_can_find,
    estimated_bytes,
    find_size,
    spec_of,
)
from keras_paragrad.memory.trial import PreparationCall, Trials, preparations_of

# The steps of a trial, which trains in a separate process to measure the memory of a slice size.
_STEPS = 2
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
    their normalizers, and metrics see every example. The slices run sequentially inside the compiled step, with
    `jit_compile`, `steps_per_execution` and strategies; under a strategy, each replica slices its batch.

    Args:
        model: A model, compiled or not yet.
        size: The maximum number of examples in a slice, per replica. The last slice of a batch holds the rest. `"auto"`
            chooses at the first `fit`, on one device: the largest slices of equal size that fit, by the estimate, and
            by training on them in separate processes; see `find_batch_size`. What it tries is printed.
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
        A handle: `undo()`, or leaving a `with` block, restores the model's own training step. Its attribute `size` is
        the number, once it is chosen.

    Raises:
        ValueError: `size` is neither an integer of at least 1 nor `"auto"`, or the model runs in a pipeline. `fit`
            raises it if a batch has more than `size` examples, and neither its loss nor a call of a layer can be
            divided; and with `"auto"` as `find_batch_size` does. The message says what to write. Smaller batches are
            trained on whole.

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
        size: int | str,
        *,
        weighting: str | DivisorFunction = "auto",
        prove: bool = True,
        deterministic: bool | int = False,
    ):
        check_instance("model", model, keras.Model, "a Keras model")
        check_flag("prove", prove)
        checked = check_integer("size", size, most=2**31 - 1, also=("auto",), example=64)
        normalize = LossNormalization(
            check_choice_or_function("weighting", weighting, SLICE_WEIGHTINGS, PARAMETERS), DIVIDER
        )
        builder = StepBuilder.of(model)
        parts = check_parts(deterministic)
        if parts and checked == "auto":
            raise ValueError(
                f"size='auto' chooses the rows of a slice, and deterministic={deterministic} their number. Write "
                f"microbatch(model, size=64, deterministic={deterministic}), for instance."
            )
        if not isinstance(builder.stages.split, Slices | UnchosenSlices | FixedParts | None):
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
        self._slices: Slices | UnchosenSlices | FixedParts
        if parts:
            on_replicas = f"Write DistributedFit(..., deterministic={parts}), and dist.fit(model, ...)."
            self._slices = FixedParts(parts, normalize, prove, checked, for_replicas=on_replicas)
            enable_determinism()
        else:
            self._slices = UnchosenSlices(normalize, prove) if checked == "auto" else Slices(checked, normalize, prove)
        builder.fill(split=self._slices)

    @property
    def size(self) -> int | str:
        """The maximum number of examples in a slice; `"auto"` until the first `fit` has chosen it."""
        filler = StepBuilder.of(self.model).stages.split
        return (filler if isinstance(filler, Slices) else self._slices).size

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
        normalize: Computes the weight of a slice: the divisor of its loss.
        prove: Whether the first batch is to prove that its slices give what it gives.
        planned: Whether a plan of what fits has chosen them, which the user's own replace without a word.
    """

    size: int
    normalize: LossNormalization
    prove: bool = True
    planned: bool = False

    def as_planned(self) -> "Slices":
        """The same, chosen by a plan."""
        return self._replace(planned=True)

    @property
    def preparation(self) -> PreparationCall:
        """The call that fills the stage, for the process of a trial to repeat."""
        return PreparationCall(__name__, "microbatch", {"size": self.size, "weighting": self.normalize.weighting})

    @property
    def undivided(self) -> str:
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


class UnchosenSlices(NamedTuple):
    """Fills the *split* stage until the first `fit` chooses a size.

    Attributes:
        normalize: Computes the weight of a slice.
        prove: As in `Slices`.
        size: In place of a number.
    """

    normalize: LossNormalization
    prove: bool
    size: str = "auto"

    def choose(self, model: keras.Model, adapter: Adapter | None) -> Slices:
        """Searches for the largest slices of equal size that fit, by the estimate and then by trials.

        Args:
            model: The model.
            adapter: The data of the running `fit`; `None` for `train_on_batch`.

        Raises:
            ValueError: Not even a row fits, or nothing can be tried. The message says what to write.
        """
        if adapter is None:
            raise _no_fit()
        check_can_find(model, "microbatch(model, 'auto')", "Write microbatch(model, size=...), with what it finds")
        device_bytes = memory_of_device(None, _STEPS)
        batch, rows = sample_rows(adapter, ROWS)
        data = keras.utils.unpack_x_y_sample_weight(batch)
        spec = spec_of(model, data)
        builder = StepBuilder.of(model)

        def estimate(size: int) -> int:
            with builder.split_as(Slices(size, self.normalize)):
                return estimated_bytes(model, spec, rows)

        def begin() -> Callable[[int], int | None]:
            trials = Trials(model, data, device_bytes, _STEPS, preparations_of(model, without="split"))
            return lambda size: trials.bytes_of(rows, [Slices(size, self.normalize).preparation])

        sizes = sorted({-(-rows // slices) for slices in range(1, rows + 1)})
        found = find_size(model, sizes, device_bytes, estimate, begin, TrialLog("microbatch", 1))
        return Slices(int(found), self.normalize, self.prove)

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """Raises a `ValueError`: a batch came before `fit` chose a size."""
        raise _no_fit()


def _no_fit() -> ValueError:
    return ValueError(
        "microbatch(model, 'auto') chooses the size of slices at the first fit(), by its batch. Call fit() first, or "
        "write microbatch(model, size=64), for instance."
    )
