"""Numbers for whole batches that a `test_step` gives to `Sum`s and weighted `Mean`s, tried on synthetic rows."""

import functools
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Batch, Scalar
from keras_paragrad.engine.probes.independence import once_per_compile
from keras_paragrad.engine.probes.trial import SIZES, Inconclusive, PureFunction, run_trial, take_rows
from keras_paragrad.engine.probes.weighting_trial import BOUNDS, over_draws

# What of the parts adds up to the whole batch's: numbers, weights, and numbers times weights.
NUMBERS, WEIGHTS, PRODUCTS = "numbers", "weights", "products"
_TOLERANCE = 1e-4
_thread = threading.local()


def note_in_trial(value: tf.Tensor, weight: Scalar) -> None:
    """Notes what a metric is given, if this is the trial."""
    if (noted := getattr(_thread, "noted", None)) is not None:
        noted.append(tf.stack([tf.cast(value, "float32"), tf.reduce_sum(tf.cast(weight, "float32"))]))


def what_adds_up(model: keras.Model, data: Batch) -> list[set[str]] | None:
    """Of each such scalar of a custom `test_step`, in order, what adds up; `None` if the step can't be tried."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    arguments = {"x": x, "y": y, "sample_weight": sample_weight}

    def find(size: int) -> list[set[str]]:
        compute = PureFunction(model, functools.partial(_scalars, model))
        given = data if isinstance(data, tuple) else (data,)
        draws = over_draws(
            model, given, size, lambda batch: _compare(compute, batch if isinstance(data, tuple) else batch[0])
        )
        return [set.intersection(*each) for each in zip(*draws, strict=True)]

    return once_per_compile(
        ("counted scalars",),
        model,
        arguments,
        lambda: run_trial(find, *SIZES, otherwise=None, question=None),
        by_replicas=False,
    )


def _scalars(model: keras.Model, data: Batch) -> tf.Tensor:
    """The scalars that a `test_step` gives to metrics, with their weights: `(scalars, 2)`."""
    _thread.noted = []
    try:
        model.test_step(data)
        return tf.stack(_thread.noted) if _thread.noted else tf.zeros((0, 2))
    finally:
        _thread.noted = None


def _compare(compute: PureFunction, batch: Any) -> list[set[str]]:
    """For each scalar, what adds up."""
    whole, *parts = (
        np.asarray(compute(each)[0], "float64") for each in (batch, *(take_rows(batch, *rows) for rows in BOUNDS))
    )
    if any(part.shape != whole.shape for part in parts) or not np.isfinite(whole).all():
        raise Inconclusive("the step counts other numbers on other rows")
    (values, weights), (total, weight) = np.moveaxis(np.stack(parts), -1, 0), whole.T
    adds = {
        NUMBERS: _close(values.sum(0), total),
        WEIGHTS: _close(weights.sum(0), weight),
        PRODUCTS: _close((values * weights).sum(0), total * weight),
    }
    return [{what for what, each in adds.items() if each[index]} for index in range(len(whole))]


def _close(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.abs(found - expected) <= _TOLERANCE * np.abs(expected)
