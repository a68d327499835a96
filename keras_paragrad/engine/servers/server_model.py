"""Makes a model, whose variables are on parameter servers, run its steps on workers.

chief: for each batch, send a step to the next idle worker; states of metrics = start + sum of the returned increments
worker: read the weights, compute, update the weights; return the increments of the states of metrics
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import without_optionals
from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.optimizer import updating_optimizers
from keras_paragrad.compat.state import replace_methods, restore_methods
from keras_paragrad.compat.types import Array, Batch, BatchIterator, Scalar, Step, StepLogs, Structure, TrainFunction
from keras_paragrad.engine.replicas.prepared import make_on_demand
from keras_paragrad.engine.step.building import build_from_data
from keras_paragrad.engine.step.execution import check_not_dry
from keras_paragrad.engine.tracing.gradient_functions import releasing

Result = TypeVar("Result")


class MetricStates:
    """Sums the steps' increments of the states of a model's metrics, in any order.

    Keras reads and then writes a metric's variables, and another worker may write in between. Here a step returns
    increments, and the chief adds them. So no example is lost or counted twice. A state that is not a sum is refused.
    """

    def __init__(self, model: keras.Model):
        self._model: keras.Model = model
        self._variables: list[keras.Variable] = list(model.metrics_variables)
        others = {variable.path: variable.aggregation for variable in self._variables if variable.aggregation != "sum"}
        if others:
            raise ValueError(
                f"Metrics have states that are not sums over the examples ({others}), and the metrics of workers can "
                "only be summed. Create these with add_variable(..., aggregation='sum'), or leave the metrics out."
            )
        with _holding_tensors(self._variables):
            type(self._model).reset_metrics(self._model)
            self._start = _packed(self._variables).numpy()
        self._lock = threading.Lock()
        self._total = self._start.copy()
        self._compiled = tf.function(self._results, autograph=False)

    def matches(self, model: keras.Model) -> bool:
        """Whether the model still has these metrics."""
        return [id(variable) for variable in model.metrics_variables] == [id(variable) for variable in self._variables]

    def compute_added(self, step: Callable[[], StepLogs]) -> tf.Tensor:
        """Traces a step. Returns its increments of the states. Refuses logs that aren't metrics."""
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
        """Adds the increments of a step. Thread-safe."""
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
    """Context in which variables hold tensors. Assignments don't reach a server, and are discarded at the end."""
    with contextlib.ExitStack() as stack:
        for variable in variables:
            rebind = functools.partial(_rebind, variable)
            stack.enter_context(override_attributes(variable, _direct_assign=rebind, _value=variable._value))
        yield


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


def _compiled(model: keras.Model, step: Callable[[Batch], Result]) -> Callable[[Batch], Result]:
    """Compiles a step for one worker."""
    strategy = model.distribute_strategy
    run = releasing(lambda data: strategy.run(step, args=(_open_batch_size(data),)))
    return tf.function(run, reduce_retracing=True, autograph=False)


def _open_batch_size(data: Batch) -> Batch:
    """Makes the number of rows dynamic, as in `fit` on one device.

    Keras weights the outputs' losses by the static number of rows. Without this, all batches would weigh the same.
    """

    def open_batch_size(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rows, *sizes = tf.unstack(leaf.dense_shape)
            rest = [size if known is None else known for size, known in zip(sizes, leaf.shape[1:], strict=True)]
            return tf.SparseTensor(leaf.indices, leaf.values, tf.stack([_open_rows(rows), *rest]))
        if isinstance(leaf, tf.RaggedTensor):
            splits = [_open_rows(splits) for splits in leaf.nested_row_splits]
            return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values, splits, validate=False)  # pyright: ignore
        return _open_rows(leaf)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else open_batch_size(leaf), data)


def _open_rows(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]] if tensor.shape.rank else [])


@contextlib.contextmanager
def _incrementing_on_server(optimizer: keras.optimizers.Optimizer | None) -> Generator[None]:
    """Context in which an optimizer's counter is incremented on its server, atomically.

    Keras reads the counter and then writes it, so increments of other workers in between would be lost.
    """
    with contextlib.ExitStack() as stack:
        for inner in [] if optimizer is None else updating_optimizers(optimizer):
            counter: Any = inner.iterations
            stack.enter_context(override_attributes(counter, assign_add=functools.partial(_increment, counter)))
        yield


def _increment(counter: keras.Variable, value: Scalar) -> object:
    return counter.value.assign_add(tf.cast(value, counter.dtype))


class StepSender(Protocol):
    """Sends steps to workers."""

    def send(self, step: Callable[[Batch], Structure], batch: Batch, on_result: Callable[[Any], object]) -> Future[Any]:
        """Runs a step on the next idle worker, and calls `on_result` with its results as NumPy arrays."""
        ...

    def join(self) -> None:
        """Waits for all results."""
        ...


class ParameterServerModel:
    """Runs a model's steps on workers, with its weights on parameter servers.

    `check` is called before a train function is built, and raises if parameter servers can't train the model. `waits`
    says whether each call of the train and test functions waits for its steps, as in `train_on_batch`.
    """

    def __init__(self, model: keras.Model, sender: StepSender, check: Callable[[], None]):
        check_internals("models", "steps")
        self._model, self._sender, self._check = model, sender, check
        self._metric_states: MetricStates | None = None
        self.waits = True
        self._methods = {
            "_maybe_symbolic_build": functools.partial(build_from_data, model),
            "make_train_function": make_on_demand(model, "train_function", self._train_function),
            "make_test_function": make_on_demand(model, "test_function", lambda: self._function(model.test_step)),
            "make_predict_function": make_on_demand(model, "predict_function", self._predict_function),
            "get_metrics_result": self._get_metrics_result,
            "reset_metrics": self._reset_metrics,
        }
        self.install()

    def install(self) -> None:
        """Installs the methods, unless they are. Another component may have removed them with its own."""
        if self._model.__dict__.get("make_train_function") is self._methods["make_train_function"]:
            return
        replace_methods(self._model, **self._methods)
        self._forget_functions()

    def undo(self) -> None:
        """Restores the methods of the model's class."""
        restore_methods(self._model, *self._methods)
        self._forget_functions()

    def _forget_functions(self) -> None:
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    @property
    def _metrics(self) -> MetricStates:
        if self._metric_states is None or not self._metric_states.matches(self._model):
            self._metric_states = MetricStates(self._model)
        return self._metric_states

    def _train_function(self) -> TrainFunction:
        self._check()
        return self._function(self._model.train_step)

    def _predict_function(self) -> Callable[[list[Batch]], Structure]:
        """A function that predicts batches on workers, and joins them in order."""
        step = _compiled(self._model, self._model.predict_step)

        def predict(batches: list[Batch]) -> Structure:
            futures = [self._sender.send(step, self._as_tensors(batch), lambda outputs: outputs) for batch in batches]
            outputs = [future.result() for future in futures]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        return predict

    def _function(self, run_step: Step) -> TrainFunction:
        """A train or test function that sends a step to a worker for each batch."""
        metric_states = self._metrics

        def contribute(data: Batch) -> tf.Tensor:
            with _incrementing_on_server(self._model.optimizer):
                return metric_states.compute_added(lambda: run_step(data))

        step = _compiled(self._model, contribute)

        def run(iterator: BatchIterator) -> StepLogs:
            try:
                for index in range(self._model.steps_per_execution):
                    try:
                        batch = next(iterator)
                    except (StopIteration, tf.errors.OutOfRangeError):
                        if index:
                            break
                        check_not_dry(self._model)
                        raise StopIteration from None
                    self._sender.send(step, self._as_tensors(batch), metric_states.add)
                if self.waits:
                    self._sender.join()
                return metric_states.results()
            except tf.errors.CancelledError:
                # If a worker's step fails, TensorFlow cancels the chief's operations too. This raises the cause.
                self._sender.join()
                raise

        return run

    def _as_tensors(self, batch: Batch) -> Batch:
        batch = without_optionals(self._model, lambda data: data)(batch)
        return keras.tree.map_structure(lambda leaf: None if leaf is None else _as_tensor(leaf), batch)

    def _get_metrics_result(self) -> StepLogs:
        if tf.inside_function():
            return type(self._model).get_metrics_result(self._model)
        self._sender.join()
        self._metrics.write()
        return self._metrics.results()

    def _reset_metrics(self) -> None:
        type(self._model).reset_metrics(self._model)
        if not tf.inside_function():
            self._metrics.reset()


def _as_tensor(leaf: Any) -> Any:
    composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if composite else tf.convert_to_tensor(leaf)
