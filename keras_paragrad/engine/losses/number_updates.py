"""Replaces the numbers for whole batches that a custom step gives to `Mean`s and `Sum`s."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.model import step_metrics
from keras_paragrad.compat.state import MethodPatch, patched
from keras_paragrad.compat.types import Scalar


class NumberCounter(Protocol):
    """Counts the numbers of a part of a batch such that all parts together show those of the batch."""

    def of_mean(self, value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, Any]:
        """The number and the weight for a `Mean` that was given these; errors name the number `what`."""
        ...

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """The number for a `Sum` that was given this one, times its weight."""
        ...


@contextlib.contextmanager
def counting_numbers(model: keras.Model, counter: NumberCounter) -> Generator[None]:
    """Context in which a counter replaces the numbers that `Mean`s and `Sum`s of a model are given on this thread.

    Values per example stay.
    """
    with patched(model, lambda: _NumberUpdates(step_metrics(model))) as updates:
        # Each replica is traced on a thread of its own, and so is a trial.
        thread = threading.get_ident()
        updates.counters[thread] = counter
        try:
            yield
        finally:
            del updates.counters[thread]


class _NumberUpdates(MethodPatch):
    """Lets the counters of threads replace the numbers that metrics are given."""

    def __init__(self, metrics: Sequence[keras.metrics.Metric]):
        super().__init__()
        self.metrics = metrics
        self.counters: dict[int, NumberCounter] = {}

    def patch_all(self) -> None:
        """Replaces `update_state` of each metric."""
        kinds = {
            keras.metrics.Mean.update_state: self._update_mean,
            keras.metrics.Sum.update_state: self._update_sum,
        }
        for metric in self.metrics:
            if replacement := kinds.get(type(metric).update_state):
                what = f"the update of {metric.name!r}"
                self.replace(metric, "update_state", functools.partial(replacement, what, metric.update_state))

    @property
    def _counter(self) -> NumberCounter | None:
        return self.counters.get(threading.get_ident())

    def _update_mean(self, what: str, update: Callable[..., None], values: Scalar, sample_weight: Any = None) -> None:
        values, counter = as_scalar(values), self._counter
        if values.shape.rank == 0 and counter:
            values, sample_weight = counter.of_mean(values, sample_weight, what)
        update(values, sample_weight=sample_weight)

    def _update_sum(self, what: str, update: Callable[..., None], values: Scalar, sample_weight: Any = None) -> None:
        values, counter = tf.convert_to_tensor(values), self._counter
        if values.shape.rank == 0 and counter:
            if sample_weight is not None:
                values, sample_weight = values * tf.reduce_sum(tf.cast(sample_weight, values.dtype)), None
            values = counter.of_sum(values, what)
        update(values, sample_weight=sample_weight)


def as_scalar(value: Scalar) -> tf.Tensor:
    """A tensor. Keras's mean over no elements is an empty vector if its shape is static, and otherwise a scalar."""
    value = tf.convert_to_tensor(value)
    return tf.zeros((), value.dtype) if value.shape == (0,) else value


def as_mean(part: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The number whose mean over the parts, weighted by their shares of the batch, is the sum of the parts' sums."""
    return tf.math.divide_no_nan(part, tf.cast(share, part.dtype))
