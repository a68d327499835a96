"""A batch in micro-batches, all of them in one graph, so that TensorFlow runs several stages at once."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.accumulation.slice_sums import SliceSums, rows_at
from keras_paragrad.engine.losses.normalization import LossNormalization
from keras_paragrad.engine.pipeline.columns import Columns
from keras_paragrad.engine.replicas.shard import Shard, rows_of
from keras_paragrad.engine.step.forward import StepContext
from keras_paragrad.engine.step.gradient import Gradient
from keras_paragrad.engine.step.indivisible import DeferredRefusal
from keras_paragrad.engine.step.symbolic import build_losses


class _MaybeRepeated(Shard):
    """A micro-batch that has no row of its own where a batch has fewer than micro-batches, and one of another's then.

    It counts for nothing, and its gradient is finite where the other's is.
    """

    def gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients, whose weight is 0 if the row is another's."""
        return list(gradients)


class MicroBatches(NamedTuple):
    """Fills the *split* stage.

    Attributes:
        parts: How many micro-batches a batch is cut into, or as many as it has rows.
        normalize: Measures the weight of a micro-batch.
        columns: Is told which micro-batch is computed: they take turns on a stage's devices.
        width: The most devices that a stage has.
    """

    parts: int
    normalize: LossNormalization
    columns: Columns
    width: int

    @property
    def size(self) -> int:
        """A single example is never cut."""
        return 1

    @property
    def deferred_refusal(self) -> DeferredRefusal:
        """For batches that aren't cut, the check that only logs what micro-batches would refuse."""
        return DeferredRefusal(self.normalize, "is trained on whole batches. Cutting them into micro-batches")

    @property
    def undivided(self) -> str:
        """Which batch can't be cut, for the error of a model that allows no micro-batches."""
        return f"A batch can't be cut into microbatches={self.parts}."

    def cuts(self, data: Any) -> bool | None:
        """Whether a batch is cut; `None` if its static shape is unknown."""
        if self.parts == 1:
            return False
        known = _static_rows(data)
        return None if known is None else known > 1

    def __call__(self, context: StepContext, data: Any) -> Gradient:
        """The gradient of a batch, from those of its micro-batches."""
        # Metrics are updated in a branch, in which they can't make their variables.
        build_losses(context.model, rows_at(data, 0, 1), metrics=True)
        sums = SliceSums(context)
        known = _static_rows(data)
        rows: Any = rows_of(data) if known is None else known
        count = self.parts if known is None else min(self.parts, known)
        # Gradients are summed on the devices that have computed them, and once go to those of the variables.
        totals = [sums.empty() for _ in range(min(self.width, count))]
        with self.columns.batch():
            for index in range(count):
                self.columns.micro_batch = index
                first, last = index * rows // count, (index + 1) * rows // count
                if known is not None:
                    part, how = rows_at(data, first, last - first), {}
                else:
                    part = rows_at(data, first, tf.maximum(last - first, 1))
                    how = {"shard": _MaybeRepeated(last - first, last > first)}
                column = index % len(totals)
                totals[column] = sums.add(totals[column], part, rows, **how)
        return sums.gradient(functools.reduce(sums.joined, totals), rows)


def _static_rows(data: Any) -> int | None:
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None).shape[0]
