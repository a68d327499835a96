"""The numbers that a custom step gives to metrics in slices, and in the micro-batches of a window."""

import contextlib
from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index, sum_over_replicas
from keras_paragrad.compat.model import step_metrics
from keras_paragrad.compat.state import patched
from keras_paragrad.engine.losses.counted_scalars import (
    BY_ROWS,
    MEANS,
    NUMBERS,
    PRODUCTS,
    WEIGHTS,
    Cursor,
    MadeUpBy,
    NumberParts,
    is_sum_of_parts,
)
from keras_paragrad.engine.losses.number_updates import NumberUpdates, as_mean
from keras_paragrad.engine.losses.refusals import added_scalar_refusal, counted_scalar_refusal, weighted_scalar_refusal
from keras_paragrad.engine.probes.trial import is_trial


class SliceNumbers:
    """Counts what a slice, or a micro-batch of a window, gives to metrics; one for each run of the step.

    Args:
        model: The model.
        share: The slice's share of the batch, or the rows of the micro-batch.
        scalars: What makes up the step's numbers.
        summed: Whether to sum a number if no trial shows what makes it up.
        in_window: Whether it is a micro-batch of a window.
    """

    def __init__(
        self,
        model: keras.Model,
        share: tf.Tensor,
        scalars: NumberParts | None,
        *,
        summed: bool,
        in_window: bool = False,
    ):
        self.model, self.share, self.summed, self.in_window = model, share, summed, in_window
        self._numbers = Cursor(lambda: scalars)

    def of_mean(self, value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, Any]:
        """A number that a `Mean` is given, and its weight."""
        made_up_by = self._numbers.next_update()
        if weight is not None:
            return self._weighted(value, what, made_up_by), weight
        return self._sum(value) if is_sum_of_parts(made_up_by, self.summed) else value, self.share

    def _weighted(self, value: tf.Tensor, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """A number that a `Mean` is given with a weight of its own."""
        if made_up_by is None:
            return self._sum(value) if self.summed else value
        if WEIGHTS not in made_up_by:
            raise counted_scalar_refusal("train_step", self.model, what)
        if PRODUCTS in made_up_by:
            return value
        if {NUMBERS, BY_ROWS} <= made_up_by:
            return self._sum(value)
        if not self.in_window:
            raise weighted_scalar_refusal(self.model, what)
        return value

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """The whole sum, of the sums that parts have."""
        # What a window adds up to isn't known before its end: a micro-batch's parts are the replicas'.
        share = self.share / sum_over_replicas([self.share])[0] if self.in_window else self.share
        return as_mean(value, share)

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """A number that a `Sum` is given."""
        made_up_by = self._numbers.next_update() or set()
        if NUMBERS in made_up_by:
            return value
        if self.in_window or MEANS not in made_up_by:
            raise added_scalar_refusal(self.model, what, in_window=self.in_window)
        return tf.cast(value, self.share.dtype) * self.share


class _CountedUpdates(NumberUpdates):
    """Has the numbers that metrics are given counted as parts of the batch's."""

    def __init__(self, metrics: list[keras.metrics.Metric]):
        super().__init__(metrics)
        self.numbers: dict[int, SliceNumbers] = {}

    def counter(self) -> SliceNumbers | None:
        """This replica's."""
        return None if is_trial() else self.numbers[replica_index()]


@contextlib.contextmanager
def counting_numbers(numbers: SliceNumbers) -> Generator[None]:
    """Context of a slice or micro-batch, in which `Mean`s and `Sum`s count numbers as parts of the batch's."""
    with patched(numbers.model, lambda: _CountedUpdates(step_metrics(numbers.model))) as updates:
        updates.numbers[replica_index()] = numbers
        yield
