"""The numbers that a custom step gives to metrics in parts: slices, and the micro-batches of a window.

A number is a scalar for the whole batch. A window is the micro-batches of one update. A part's *share* of the batch
weights its number in the batch's mean.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import sum_over_replicas
from keras_paragrad.engine.losses.counted_scalars import (
    BY_ROWS,
    MEANS,
    NUMBERS,
    PRODUCTS,
    WEIGHTS,
    MadeUpBy,
    NumberParts,
    is_sum_of_parts,
)
from keras_paragrad.engine.losses.number_updates import as_mean
from keras_paragrad.engine.losses.refusals import added_scalar_refusal, counted_scalar_refusal, weighted_scalar_refusal


class PartNumbers(abc.ABC):
    """Replaces the numbers that a part of a batch gives to metrics; one instance for each run of the step.

    Args:
        find: Finds how parts make up the step's numbers; `None` if they can't be tried.
        exact: Whether to refuse numbers that parts don't make up.
        in_window: Whether the part is a micro-batch of a window.
    """

    def __init__(
        self, model: keras.Model, find: Callable[[], NumberParts | None], *, exact: bool, in_window: bool = False
    ):
        self.model, self.exact, self.in_window = model, exact, in_window
        self._find = functools.cache(find)
        self._updates = 0

    def made_up_by(self, index: int) -> MadeUpBy | None:
        """How parts make up a returned value; `None` if unknown."""
        numbers = self._find()
        return numbers.logs[index] if numbers and index < len(numbers.logs) else None

    def _next_update(self) -> MadeUpBy | None:
        """How parts make up the next number that a metric receives; `None` if unknown."""
        self._updates += 1
        numbers = self._find()
        return numbers.updates[self._updates - 1] if numbers and self._updates <= len(numbers.updates) else None

    @abc.abstractmethod
    def share(self, what: str) -> tf.Tensor:
        """The part's share of the batch; errors call the number `what`."""

    @abc.abstractmethod
    def of_batch(self, value: Any, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """The number to use in place of `value`: its mean over the parts, weighted by shares, is the batch's number."""

    @abc.abstractmethod
    def weighted(self, value: tf.Tensor, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        """The same for a weighted `Mean`; refuses numbers that parts don't make up."""

    def of_mean(self, value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, Any]:
        """The number and the weight that a `Mean` receives in place of a part's.

        Args:
            value: The part's number.
            weight: The weight that the step gives it, which is kept, or `None`.
            what: What errors call the number.
        """
        made_up_by = self._next_update()
        if weight is not None:
            return self.weighted(value, what, made_up_by), weight
        # Without a weight, the batch counts once: the shares of its parts add up to that.
        return self.of_batch(value, what, made_up_by), self.share(what)

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """Replaces the number that a `Sum` receives; refuses numbers that parts don't make up."""
        made_up_by = self._next_update() or set()
        if NUMBERS in made_up_by:
            return value
        if self.in_window or (self.exact and MEANS not in made_up_by):
            raise added_scalar_refusal(self.model, what, in_window=self.in_window)
        # Summed over the parts, number times share is the batch's number.
        number, share = self.of_batch(value, what, made_up_by), self.share(what)
        return tf.cast(number, share.dtype) * share


class SliceNumbers(PartNumbers):
    """Replaces the numbers that a slice, or a micro-batch of a window, gives to metrics.

    `share` is the slice's share of the batch, or the rows of the micro-batch. Numbers are summed, if `summed` and no
    trial shows how parts make them up.
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
        super().__init__(model, lambda: scalars, exact=True, in_window=in_window)
        self._share, self.summed = share, summed

    def share(self, what: str) -> tf.Tensor:
        return self._share

    def of_batch(self, value: Any, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        return self._sum(value) if is_sum_of_parts(made_up_by, self.summed) else value

    def weighted(self, value: tf.Tensor, what: str, made_up_by: MadeUpBy | None) -> tf.Tensor:
        if made_up_by is None:
            return self._sum(value) if self.summed else value
        if WEIGHTS not in made_up_by:
            raise counted_scalar_refusal("train_step", self.model, what)
        if PRODUCTS in made_up_by:
            return value
        # Weights are proportional to rows, as shares are.
        if {NUMBERS, BY_ROWS} <= made_up_by:
            return self._sum(value)
        if not self.in_window:
            raise weighted_scalar_refusal(self.model, what)
        return value

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """The number whose weighted mean over the parts is the sum of their numbers."""
        # A window's sum isn't known before its end: a micro-batch's parts are the replicas'.
        share = self._share / sum_over_replicas([self._share])[0] if self.in_window else self._share
        return as_mean(value, share)
