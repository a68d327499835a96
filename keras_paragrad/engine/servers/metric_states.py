"""The states of a model's metrics as a vector: steps on workers return increments, and the chief sums them."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Array, StepLogs

_ASSIGN = "_direct_assign"


class MetricStates:
    """Sums the steps' contributions to the states of a model's metrics, in any order of arrival.

    Keras reads and then writes a metric's variables, between which other workers may write too. Here each step computes
    its contribution, and the chief adds it: no example is lost or counted twice. A state that is not a sum is refused.
    """

    def __init__(self, model: keras.Model):
        self._model: keras.Model = model
        self._variables: list[keras.Variable] = list(model.metrics_variables)
        self._check()
        with _holding_tensors(self._variables):
            type(self._model).reset_metrics(self._model)
            self._start = _packed(self._variables).numpy()
        self._lock = threading.Lock()
        self._total = self._start.copy()
        self._compiled = tf.function(self._results, autograph=False)

    def _check(self) -> None:
        """Refuses states that are not sums."""
        others = {variable.path: variable.aggregation for variable in self._variables if variable.aggregation != "sum"}
        if others:
            raise ValueError(
                f"Metrics have states that are not sums over the examples ({others}), and the metrics of workers can "
                "only be summed. Create these with add_variable(..., aggregation='sum'), or leave the metrics out."
            )

    def matches(self, model: keras.Model) -> bool:
        """Whether the model still has these metrics."""
        return [id(variable) for variable in model.metrics_variables] == [id(variable) for variable in self._variables]

    def compute_added(self, step: Callable[[], StepLogs]) -> tf.Tensor:
        """Runs a step while it is traced; returns the increments of the states. Refuses logs that aren't metrics."""
        with _holding_tensors(self._variables):
            type(self._model).reset_metrics(self._model)
            before = _packed(self._variables)
            _check_logs(self._model, step())
            return _packed(self._variables) - before

    def reset(self) -> None:
        """Resets the sums."""
        with self._lock:
            self._total = self._start.copy()

    def add(self, added: np.ndarray) -> None:
        """Adds the contribution of a step. Thread-safe."""
        with self._lock:
            self._total += added

    def results(self) -> StepLogs:
        """The results of the metrics."""
        with self._lock:
            total = tf.constant(self._total)
        return self._results(total) if self._model.run_eagerly else self._compiled(total)

    def write(self) -> None:
        """Writes the states to the metrics' variables, for code that reads them."""
        for variable, value in zip(self._variables, _unpacked(self._total, self._variables), strict=True):
            variable.assign(value)

    def _results(self, total: tf.Tensor) -> StepLogs:
        """The results of the metrics for a vector of their states."""
        with _holding_tensors(self._variables):
            for variable, value in zip(self._variables, _unpacked(total, self._variables), strict=True):
                variable.assign(value)
            return type(self._model).get_metrics_result(self._model)


def _check_logs(model: keras.Model, logs: object) -> None:
    """Refuses a step whose logs are not the model's metrics."""
    names = list(type(model).get_metrics_result(model))
    if not isinstance(logs, dict) or set(logs) != set(names):
        returned = list(logs) if isinstance(logs, dict) else type(logs).__name__
        raise ValueError(
            f"A step of {type(model).__name__} returns {returned}, and its metrics are {names}. With parameter "
            "servers, logs are metrics: give the model a keras.metrics.Mean for each other value, and let the step "
            "`return self.get_metrics_result()`."
        )


@contextlib.contextmanager
def _holding_tensors(variables: list[keras.Variable]) -> Generator[None]:
    """Context in which variables hold tensors: assignments don't reach a server, and are discarded at the end."""
    values = [variable._value for variable in variables]
    for variable in variables:
        variable.__dict__[_ASSIGN] = functools.partial(_rebind, variable)
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            del variable.__dict__[_ASSIGN]
            variable._value = value


def _rebind(variable: keras.Variable, value: Array) -> None:
    variable._value = tf.cast(value, variable.dtype)


def _packed(variables: list[keras.Variable]) -> tf.Tensor:
    # Counts, and sums of float32, are exact in float64.
    return tf.concat([tf.reshape(tf.cast(variable.value, "float64"), [-1]) for variable in variables], 0)


def _unpacked(vector: Array, variables: list[keras.Variable]) -> list[tf.Tensor]:
    parts = tf.split(vector, [variable.shape.num_elements() for variable in variables])
    return [
        tf.cast(tf.reshape(part, variable.shape), variable.dtype)
        for part, variable in zip(parts, variables, strict=True)
    ]
