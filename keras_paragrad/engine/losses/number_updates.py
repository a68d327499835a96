"""Replaces the numbers, scalars for a whole batch or a part of it, that a custom step gives to `Mean`s and `Sum`s."""

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
    """Replaces the numbers of a part of a batch so that all parts together show the batch's numbers."""

    def of_mean(self, value: tf.Tensor, weight: Any, what: str) -> tuple[tf.Tensor, Any]:
        """Replaces the number and the weight that a `Mean` receives; errors call the number `what`."""
        ...

    def of_sum(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """Replaces the number, times its weight, that a `Sum` receives."""
        ...


@contextlib.contextmanager
def counting_numbers(model: keras.Model, counter: NumberCounter) -> Generator[None]:
    """Context in which a counter replaces the numbers that a model's `Mean`s and `Sum`s receive on this thread.

    It keeps values per example.
    """
    with patched(model, lambda: _NumberUpdates(step_metrics(model))) as updates:
        # Each replica is traced on a separate thread, and so is a trial.
        thread = threading.get_ident()
        updates.counters[thread] = counter
        try:
            yield
        finally:
            del updates.counters[thread]


class _NumberUpdates(MethodPatch):
    """Makes each thread's counter replace the numbers that metrics receive."""

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
    """Converts a number to a tensor; Keras's mean over no elements, an empty vector if its shape is static, to 0."""
    value = tf.convert_to_tensor(value)
    return tf.zeros((), value.dtype) if value.shape == (0,) else value


def as_mean(part: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns part / share: its mean over the parts, weighted by their shares of the batch, is the sum of parts."""
    return tf.math.divide_no_nan(part, tf.cast(share, part.dtype))
