"""The states of a model's metrics as one vector: each step on a worker returns what it adds, and the chief sums."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ASSIGN = "_direct_assign"


class MetricStates:
    """A model's metrics, summed from the steps' contributions to their states, in any order of arrival.

    Keras changes a metric's variables by reading and writing them, between which another worker writes too. Here each
    step computes what it adds by itself, and the chief adds: no example is lost or counted twice.

    Args:
        model: A compiled and built model. Its metrics are sums over the examples, as Keras's are.

    Raises:
        ValueError: A metric has a state that is not a sum.
    """

    def __init__(self, model: keras.Model):
        self._model: Any = model
        self._variables: list[Any] = list(model.metrics_variables)
        self._check()
        with _held_apart(self._variables):
            type(self._model).reset_metrics(self._model)
            self._start = _packed(self._variables).numpy()
        self._lock = threading.Lock()
        self._total = self._start.copy()
        self._compiled = tf.function(self._results, autograph=False)

    def _check(self) -> None:
        others = {variable.path: variable.aggregation for variable in self._variables if variable.aggregation != "sum"}
        if others:
            raise ValueError(
                f"Metrics have states that are not sums over the examples ({others}), and the metrics of workers can "
                "only be summed. Create these with add_variable(..., aggregation='sum'), or leave the metrics out."
            )

    def is_of(self, model: keras.Model) -> bool:
        """Whether the model still has the metrics that are summed here."""
        return [id(variable) for variable in model.metrics_variables] == [id(variable) for variable in self._variables]

    def added_by(self, step: Callable[[], Any]) -> tf.Tensor:
        """What a step adds to the metrics, which it leaves as they are; called where a step is traced.

        Args:
            step: Updates the metrics and returns what `train_step` returns.

        Raises:
            ValueError: It returns something else than the metrics, which would not reach the chief.
        """
        with _held_apart(self._variables):
            type(self._model).reset_metrics(self._model)
            before = _packed(self._variables)
            _check_logs(self._model, step())
            return _packed(self._variables) - before

    def reset(self) -> None:
        """Resets the sums."""
        with self._lock:
            self._total = self._start.copy()

    def add(self, added: np.ndarray) -> None:
        """Adds what a step added; may be called by several threads at once."""
        with self._lock:
            self._total += added

    def results(self) -> dict[str, Any]:
        """The metrics over all examples that were added."""
        with self._lock:
            total = tf.constant(self._total)
        return self._results(total) if self._model.run_eagerly else self._compiled(total)

    def write(self) -> None:
        """Writes the states to the metrics' own variables, for code that reads them."""
        for variable, value in zip(self._variables, _unpacked(self._total, self._variables), strict=True):
            variable.assign(value)

    def _results(self, total: tf.Tensor) -> dict[str, Any]:
        with _held_apart(self._variables):
            for variable, value in zip(self._variables, _unpacked(total, self._variables), strict=True):
                variable.assign(value)
            return type(self._model).get_metrics_result(self._model)


def _check_logs(model: Any, logs: Any) -> None:
    names = list(type(model).get_metrics_result(model))
    found = list(logs) if isinstance(logs, dict) else type(logs).__name__
    if not isinstance(logs, dict) or set(logs) != set(names):
        raise ValueError(
            f"A step of {type(model).__name__} returns {found}, and its metrics are {names}. With parameter servers, "
            "logs are metrics: give the model a keras.metrics.Mean for each other value, and let the step "
            "`return self.get_metrics_result()`."
        )


@contextlib.contextmanager
def _held_apart(variables: list[Any]) -> Iterator[None]:
    """Context in which the variables are tensors: assignments are discarded at its end, and reach no server."""
    values = [variable._value for variable in variables]
    for variable in variables:
        variable.__dict__[_ASSIGN] = _rebinder(variable)
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            del variable.__dict__[_ASSIGN]
            variable._value = value


def _rebinder(variable: Any) -> Callable[[Any], None]:
    def rebind(value: Any) -> None:
        variable._value = tf.cast(value, variable.dtype)

    return rebind


def _packed(variables: list[Any]) -> tf.Tensor:
    # Sums of float32 and counts are exact in float64.
    return tf.concat([tf.reshape(tf.cast(variable.value, "float64"), [-1]) for variable in variables], 0)


def _unpacked(vector: Any, variables: list[Any]) -> list[tf.Tensor]:
    parts = tf.split(vector, [variable.shape.num_elements() for variable in variables])
    return [tf.cast(tf.reshape(part, each.shape), each.dtype) for part, each in zip(parts, variables, strict=True)]
