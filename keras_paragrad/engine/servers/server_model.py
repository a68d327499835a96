"""Installs methods on a model that run its steps on workers; its variables are on parameter servers."""

import contextlib
import functools
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import without_optionals
from keras_paragrad.compat.optimizer import updating_optimizers
from keras_paragrad.compat.state import replace_methods, restore_methods
from keras_paragrad.compat.types import Batch, BatchIterator, Scalar, Step, StepLogs, Structure, TrainFunction
from keras_paragrad.engine.replicas.prepared import make_on_demand
from keras_paragrad.engine.servers.metric_states import MetricStates
from keras_paragrad.engine.step.building import build_from_data
from keras_paragrad.engine.step.execution import check_not_dry
from keras_paragrad.engine.tracing.gradient_functions import releasing

Result = TypeVar("Result")


def _compiled(model: keras.Model, step: Callable[[Batch], Result]) -> Callable[[Batch], Result]:
    """Compiles a step for one worker."""
    strategy = model.distribute_strategy
    run = releasing(lambda data: strategy.run(step, args=(_open_batch_size(data),)))
    return tf.function(run, reduce_retracing=True, autograph=False)


def _open_batch_size(data: Batch) -> Batch:
    """Makes the number of rows dynamic, as in `fit` on one device.

    Keras weights the outputs' losses by the static number of rows: without this, all batches would weigh the same.
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

    Keras reads it and then writes it, so increments of other workers in between would be lost.
    """
    counters = [] if optimizer is None else [inner.iterations for inner in updating_optimizers(optimizer)]
    for counter in counters:
        counter.__dict__["assign_add"] = functools.partial(_increment, counter)
    try:
        yield
    finally:
        for counter in counters:
            del counter.__dict__["assign_add"]


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

    Args:
        sender: Sends steps to workers.
        check: Called before a train function is built; raises if the model can't be trained with parameter servers.

    Attributes:
        waits: Whether each call of the train and test functions waits for its steps, as in `train_on_batch`.
    """

    def __init__(self, model: keras.Model, sender: StepSender, check: Callable[[], None]):
        check_internals("models", "steps")
        self._model: keras.Model = model
        self._sender = sender
        self._check = check
        self._metric_states: MetricStates | None = None
        self._predict: Callable[[Batch], Structure] | None = None
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
        """Installs the methods, again if another component has uninstalled its own."""
        if self._model.__dict__.get("make_train_function") is self._methods["make_train_function"]:
            return
        replace_methods(self._model, **self._methods)
        self._forget_functions()

    def undo(self) -> None:
        """Restores the methods of the model's class."""
        restore_methods(self._model, *self._methods)
        self._forget_functions()

    def predict_async(self, batch: Batch) -> Future[Any]:
        """Predicts a batch on a worker. The model's `predict_function` takes the `Future` in place of the batch."""
        if self._predict is None:
            self._predict = _compiled(self._model, self._model.predict_step)
        return self._sender.send(self._predict, self._as_tensors(batch), lambda outputs: outputs)

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

    def _predict_function(self) -> Callable[[list[Batch | Future[Any]]], Structure]:
        """A function that predicts batches on workers, and joins them in order."""
        self._predict = None

        def predict(batches: list[Batch | Future[Any]]) -> Structure:
            futures = [batch if isinstance(batch, Future) else self.predict_async(batch) for batch in batches]
            outputs = [future.result() for future in futures]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        return predict

    def _function(self, run_step: Step) -> TrainFunction:
        """A train or test function that sends steps to workers; each returns its increments of metrics' states."""
        metric_states = self._metrics

        def contribute(data: Batch) -> tf.Tensor:
            with _incrementing_on_server(self._model.optimizer):
                return metric_states.compute_added(lambda: run_step(data))

        step = _compiled(self._model, contribute)

        def run(iterator: BatchIterator) -> StepLogs:
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

        def run_with_cause(iterator: BatchIterator) -> StepLogs:
            try:
                return run(iterator)
            except tf.errors.CancelledError:
                # If a worker's step fails, TensorFlow cancels the chief's operations too. This raises the cause.
                self._sender.join()
                raise

        return run_with_cause

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
