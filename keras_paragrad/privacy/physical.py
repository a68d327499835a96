"""Physical batches: the equal slices that an update is computed in, of which those without a drawn row are left out."""

import functools
import math
from typing import Any

import tensorflow as tf

from keras_paragrad.accumulation.slice_sums import rows_at
from keras_paragrad.accumulation.slices import Slices
from keras_paragrad.compat.collectives import replica_count
from keras_paragrad.engine.losses.logs import has_metrics
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.forward import StepContext, call_in_function
from keras_paragrad.engine.step.gradient import Gradient, is_slower_in_xla_loop
from keras_paragrad.privacy.sampling import present

# Rows of a physical batch are a multiple, which kernels like.
_ROWS = 8
# Standard deviations above the expected batch size that the usual number of physical batches has room for. One update
# in 44 takes another one; with more room the rows of all are more.
_USUAL = 2.0


def rows_of_update(
    needed: int, expected: int, rate: float, most: int | None = None, replicas: int = 1
) -> tuple[int, int]:
    """Rows of an update's padded batch, and of each physical batch.

    Physical batches that no drawn row falls into are not computed. So they are as large as the drawn rows, most of the
    time, fill some of them with little room left.

    Args:
        needed: The least rows of a padded batch.
        expected: The expected batch size.
        rate: The probability of each example to be drawn.
        most: The most rows of a physical batch, or `None` for any number.
        replicas: What each physical batch is divided among.

    Raises:
        ValueError: `most` can't be divided among the replicas.
    """
    if most is not None and most % replicas:
        raise ValueError(
            f"`physical_batch_size` is {most}, and can't be divided among {replicas} replicas. Write "
            f"physical_batch_size={_multiple(most, replicas)}."
        )
    usual = min(needed, math.ceil(expected + _USUAL * (expected * (1 - rate)) ** 0.5))
    parts = 1 if most is None else -(-usual // most)
    physical = _multiple(-(-usual // parts), _ROWS * replicas)
    physical = physical if most is None else min(physical, most)
    return _multiple(needed, physical), physical


class PhysicalBatches(Slices):
    """Fills the *split* stage with the physical batches of an update.

    How many there are is seen in how long an update takes, and in nothing that is kept.
    """

    private = True

    @property
    def undivided(self) -> str:
        """What can't be cut, for the error of a model that allows no physical batches."""
        return "An update can't be computed in physical batches."

    def __call__(self, context: StepContext, data: Any) -> Gradient:
        """The gradient of an update, from those of the physical batches that have drawn rows."""
        model = context.model
        drawn = tf.math.count_nonzero(present(data), dtype=tf.int32)
        # At least one: the gradient of weights' regularizers is in each, and so in that of an empty draw.
        taken = tf.maximum(1, -(-drawn // self.size))
        size = self._even(drawn, taken) if _takes_any_number_of_rows(model) else self.size
        rows = taken * size
        sums = self.make_accumulator(context, data, alike=True)

        def accumulate(data, **how):
            # Padded, so no slice ends beyond it.
            return self.accumulate(sums, taken, lambda at: rows_at(data, at * size, size, inside=True), rows, **how)

        with model.per_example.averaging(rows * replica_count()):
            # Metrics are shown of the rows that are there, whose number XLA doesn't know.
            if _by_xla(model) and not has_metrics(model) and not is_slower_in_xla_loop(model):
                # In one call, which takes less time than one for each.
                total = call_in_function(functools.partial(accumulate, by_xla=False), data)
            else:
                total = accumulate(data)
        # Each replica divides by what it has computed. What it multiplies with makes up for that, so they count alike.
        return sums.gradient(total, rows).counting_as_one()

    def _even(self, drawn: tf.Tensor, taken: tf.Tensor) -> tf.Tensor:
        """The rows of each physical batch that is computed, as few as hold what is drawn."""
        return tf.minimum(self.size, tf.maximum(1, -(-drawn // (taken * _ROWS))) * _ROWS)


def _by_xla(model: Any) -> bool:
    """Whether XLA compiles the gradient, without the noise."""
    return StepBuilder.of(model).stages.by_xla_alone(model, replica_count())


def _takes_any_number_of_rows(model: Any) -> bool:
    """Whether physical batches may have more or fewer rows from one update to the next."""
    # XLA compiles a pass anew for each number.
    if _by_xla(model):
        return False
    # A model that was called on symbolic inputs doesn't ask for it.
    inputs = getattr(model.per_example.layer, "inputs", None)
    return bool(inputs) and all(each.shape[0] is None for each in inputs)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
