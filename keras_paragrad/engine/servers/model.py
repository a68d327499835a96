"""Methods of one model, in place of those of its class, that have workers take the steps."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import parts
from keras_paragrad.compat.check import check_objects
from keras_paragrad.compat.method_patch import replace_methods, restore_methods
from keras_paragrad.engine.servers.metric_states import MetricStates
from keras_paragrad.engine.step.gradient_functions import releasing
from keras_paragrad.engine.step.symbolic import build_from


def step_on_worker(model: Any, tally: MetricStates, take: Callable[[Any], Any]) -> Callable[[Any], tf.Tensor]:
    """A compiled step that returns what it adds to the metrics.

    Args:
        model: A compiled and built model.
        tally: Its metrics.
        take: The model's `train_step` or `test_step`.
    """

    def step(data: Any) -> tf.Tensor:
        with _counting_at_once(model.optimizer):
            return tally.added_by(lambda: take(data))

    return _compiled(model, step)


def prediction_step(model: Any) -> Callable[[Any], Any]:
    """A compiled `predict_step`."""
    return _compiled(model, model.predict_step)


def _compiled(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    strategy = model.distribute_strategy
    run = releasing(lambda data: strategy.run(step, args=(_of_any_size(data),)))
    return tf.function(run, reduce_retracing=True, autograph=False)


def _of_any_size(data: Any) -> Any:
    """A batch whose shapes leave the number of its rows open, as those do that `fit` reads on one device.

    Where Keras knows the number, its trackers of outputs' losses count rows; else they count batches.
    """

    def of_any_size(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rows, *sizes = tf.unstack(leaf.dense_shape)
            rest = [size if known is None else known for size, known in zip(sizes, leaf.shape[1:], strict=True)]
            return tf.SparseTensor(leaf.indices, leaf.values, tf.stack([_open(rows), *rest]))
        if isinstance(leaf, tf.RaggedTensor):
            splits = [_open(each) for each in leaf.nested_row_splits]
            return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values, splits, validate=False)  # pyright: ignore
        return _open(leaf)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else of_any_size(leaf), data)


def _open(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]] if tensor.shape.rank else [])


@contextlib.contextmanager
def _counting_at_once(optimizer: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """Context in which an optimizer's counter is incremented on its server; Keras's own way would lose updates."""
    counters = [] if optimizer is None else [part.iterations for part in parts(optimizer)]
    for counter in counters:
        counter.__dict__["assign_add"] = _adder(counter)
    try:
        yield
    finally:
        for counter in counters:
            del counter.__dict__["assign_add"]


def _adder(counter: Any) -> Callable[[Any], Any]:
    return lambda value: counter.value.assign_add(tf.cast(value, counter.dtype))


_METHODS = (
    "_maybe_symbolic_build",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "get_metrics_result",
    "reset_metrics",
)


class Send(Protocol):
    """Has workers run steps."""

    def send(self, step: Callable[[Any], Any], batch: Any, arrived: Callable[[Any], Any]) -> Future:
        """Runs a step on the next worker that is free, and calls `arrived` with what it returns, as NumPy arrays."""
        ...

    def join(self) -> None:
        """Waits until all has arrived."""
        ...


class ParameterServerModel:
    """A model of which workers take the steps, while its weights lie on parameter servers.

    Args:
        model: A compiled model, made under a `ParameterServerStrategy`.
        sender: What runs its steps.
        check: Called before a train function is made; raises if the model can't be trained like this any more.

    Attributes:
        waits: Whether each call of the train and test functions waits for its steps, as `train_on_batch` needs it.
    """

    def __init__(self, model: keras.Model, sender: Send, check: Callable[[], None]):
        check_objects()
        self._model: Any = model
        self._sender = sender
        self._check = check
        self._tally: MetricStates | None = None
        self._predict: Any = None
        self.waits = True
        self.install()

    def install(self) -> None:
        """Installs the methods, also after other components have uninstalled theirs."""
        if self._model.__dict__.get("make_train_function") == self._make_train_function:
            return
        replace_methods(self._model, **{name: getattr(self, f"_{name.lstrip('_')}") for name in _METHODS})
        self._forget_functions()

    def undo(self) -> None:
        """Restores the methods of the model's class."""
        restore_methods(self._model, *_METHODS)
        self._forget_functions()

    def predict_soon(self, batch: Any) -> Future:
        """Has a worker predict on a batch; the model's `predict_function` takes the `Future` for the batch."""
        if self._predict is None:
            self._predict = prediction_step(self._model)
        return self._sender.send(self._predict, self._as_tensors(batch), lambda outputs: outputs)

    def _forget_functions(self) -> None:
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        build_from(self._model, iterator, data_batch)

    @property
    def _metrics(self) -> MetricStates:
        if self._tally is None or not self._tally.is_of(self._model):
            self._tally = MetricStates(self._model)
        return self._tally

    def _make_train_function(self, force: bool = False) -> None:
        if force or self._model.train_function is None:
            self._check()
            self._model.train_function = self._function(self._model.train_step)

    def _make_test_function(self, force: bool = False) -> None:
        if force or self._model.test_function is None:
            self._model.test_function = self._function(self._model.test_step)

    def _make_predict_function(self, force: bool = False) -> None:
        if not force and self._model.predict_function is not None:
            return
        self._predict = None

        def predict(batches: list) -> Any:
            soon = [batch if isinstance(batch, Future) else self.predict_soon(batch) for batch in batches]
            outputs = [future.result() for future in soon]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        self._model.predict_function = predict

    def _function(self, take: Callable[[Any], Any]) -> Callable[[Iterator], dict]:
        tally = self._metrics
        step = step_on_worker(self._model, tally, take)

        def run(iterator: Iterator) -> dict:
            for taken in range(self._model.steps_per_execution):
                try:
                    batch = next(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if taken:
                        break
                    raise StopIteration from None
                self._sender.send(step, self._as_tensors(batch), tally.add)
            if self.waits:
                self._sender.join()
            return tally.results()

        def run_or_say_why(iterator: Iterator) -> dict:
            try:
                return run(iterator)
            except tf.errors.CancelledError:
                # When a worker's step fails, TensorFlow cancels what the chief is running too. This raises the cause.
                self._sender.join()
                raise

        return run_or_say_why

    def _as_tensors(self, batch: Any) -> Any:
        batch = self._model._autoconvert_optionals(lambda data: data)(batch)
        return keras.tree.map_structure(lambda leaf: None if leaf is None else _as_tensor(leaf), batch)

    def _get_metrics_result(self) -> dict[str, Any]:
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
