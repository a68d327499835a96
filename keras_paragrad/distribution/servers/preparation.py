"""`fit`, `evaluate` and `predict` whose steps are sent to workers, with the weights on parameter servers."""

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_paragrad.accumulation.exact_accumulation import wrapping
from keras_paragrad.compat.collectives import strategy_name
from keras_paragrad.compat.data import split_for_validation
from keras_paragrad.compat.optimizer import accumulation_steps, find_accumulator, updating_optimizers
from keras_paragrad.compat.types import Batch, Logs, Structure
from keras_paragrad.distribution.data import DistributedData, FollowEpochs, distributed_dataset
from keras_paragrad.distribution.parallelism import Preparation
from keras_paragrad.engine.servers.server_model import ParameterServerModel
from keras_paragrad.engine.training.builder import StepBuilder

STEPS_PER_WORKER = 2
# The prefix that TensorFlow adds to an error message for each function that the error passes through.
_NODE = re.compile(r"\(\d+\) [A-Z_]+: |\{\{\w+ [^}]*\}\}")


class Dispatcher:
    """Dispatches steps to workers; each free worker takes the next one in the queue."""

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, workers: int):
        self._coordinator = coordinator
        # Acquired for each step that is queued or runs. A receiver's thread waits for its result.
        self._free = threading.BoundedSemaphore(STEPS_PER_WORKER * workers)
        self._receivers = ThreadPoolExecutor(STEPS_PER_WORKER * workers, "keras_paragrad-receiver")
        self._pending: set[Future[Any]] = set()

    def send(self, step: Callable[[Batch], Structure], batch: Batch, on_result: Callable[[Any], object]) -> Future[Any]:
        """Runs a step on the next free worker; blocks while too many are in flight."""
        self._raise_failed()
        self._free.acquire()
        try:
            remote = self._coordinator.schedule(step, args=(batch,))
        except Exception as error:
            self._free.release()
            self._fail(error)
        future = self._receivers.submit(self._receive, remote, on_result)
        self._pending.add(future)
        return future

    def join(self) -> None:
        """Waits until all results have arrived."""
        try:
            self._coordinator.join()
        except Exception as error:
            self._fail(error)
        wait(self._pending)
        self._raise_failed()

    def drain(self) -> None:
        """Waits until all steps have completed or failed, and raises nothing."""
        wait(self._pending)
        self._pending.clear()

    def _receive(self, remote: Any, on_result: Callable[[Any], object]) -> Any:
        """Waits for a scheduled step, and returns what `on_result` makes of its result; runs in another thread."""
        try:
            try:
                result = remote.fetch()
            except tf.errors.OpError:
                # If the worker was lost before we read its result, `join` waits until another one has run the step; if
                # the step failed, it raises that error.
                self._coordinator.join()
                result = remote.fetch()
            return on_result(result)
        except tf.errors.OpError as error:
            raise RuntimeError(_explain(error)) from error
        finally:
            self._free.release()

    def _raise_failed(self) -> None:
        """Forgets the steps that have succeeded, and raises if one has failed."""
        done = {future for future in self._pending if future.done()}
        failed = {future for future in done if future.exception()}
        self._pending -= done - failed
        if failed:
            self._fail()

    def _fail(self, first: Exception | None = None) -> NoReturn:
        """Waits for all steps, and raises the error that caused all others; `first` is an error raised here, if any."""
        wait(self._pending)
        errors = [first, *(future.exception() for future in self._pending)]
        self._pending.clear()
        try:
            # Otherwise the next step would raise a pending error.
            self._coordinator.join()
        except Exception as error:
            errors.insert(1, error)
        # A failed step cancels other workers' steps, which may be reported first.
        causes = [error for error in errors if isinstance(error, Exception)]
        error = min(causes, key=lambda cause: isinstance(cause.__cause__ or cause, tf.errors.CancelledError))
        if isinstance(error, tf.errors.OpError):
            raise RuntimeError(_explain(error)) from error
        raise error


def _explain(error: tf.errors.OpError) -> str:
    """The message for an error of a step on a worker."""
    message = str(error.message)
    lines = [_NODE.sub("", line).strip() for line in message.splitlines() if "root error(s) found" not in line]
    reason = next((line for line in lines if line), "")[:500]
    if "/job:ps" in message and isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
        return (
            "A parameter server was lost, and with it the weights that it held. Restart the whole cluster, and resume "
            f"from a backup. TensorFlow says: {reason}"
        )
    return f"A step failed on its worker, and the steps after it were cancelled. {type(error).__name__}: {reason}"


class ServerPreparation(Preparation):
    """A model whose own `fit`, `evaluate` and `predict` work under a `ParameterServerStrategy`.

    The chief reads the batches, and sends each to the next free worker: every example once per epoch, one update per
    batch. Workers don't wait for each other, so gradients are stale: training differs from training on one device, and
    between runs. Metrics and counters cover every example and update once; evaluation and prediction are exact.
    """

    changes_in_place = True

    def renew(self) -> None:
        """Replaces `fit`, `evaluate` and `predict`, whose steps are dispatched to workers."""
        check_server_model(self.model)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self.model.distribute_strategy)
        devices = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
        self._dispatcher = Dispatcher(coordinator, len({device.task for device in devices if device.job == "worker"}))
        self._served = ParameterServerModel(self.model, self._dispatcher, lambda: check_server_model(self.model))
        self.replace(fit=self._fit, evaluate=self._evaluate, predict=self._predict)

    def stop(self) -> None:
        self._served.undo()

    def _fit(self, *arguments: Any, **keywords: Any) -> keras.callbacks.History:
        """`fit`, with data that the chief reads, and steps that workers take."""
        bound = self._bind("fit", arguments, keywords)
        with wrapping(self.model, keras.tree.flatten(bound["callbacks"])):
            check_server_model(self.model)
        if bound["validation_split"] and bound["validation_data"] is None:
            rows, bound["validation_data"] = split_for_validation(
                bound["x"], bound["y"], bound["sample_weight"], bound["validation_split"]
            )
            bound.update(zip(("x", "y", "sample_weight"), rows, strict=True), validation_split=0.0)
        batch_size = bound["batch_size"]
        callbacks = self._read_on_chief(bound, "batch_size", "shuffle", "class_weight", "steps_per_epoch")
        if bound["validation_data"] is not None and not isinstance(bound["validation_data"], DistributedData):
            rows = keras.utils.unpack_x_y_sample_weight(bound["validation_data"])
            size, steps = bound["validation_batch_size"] or batch_size, bound["validation_steps"]
            bound["validation_data"] = _on_chief(*rows, batch_size=size, steps_per_epoch=steps)
        if not isinstance(bound["callbacks"], keras.callbacks.CallbackList):
            bound["callbacks"] = [*callbacks, *(bound["callbacks"] or []), _CheckModel()]
        with self._dispatching():
            return type(self.model).fit(self.model, **bound)

    def _evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """`evaluate`, with data that the chief reads, and steps that workers take."""
        bound = self._bind("evaluate", arguments, keywords)
        extra = bound.pop("kwargs", {})
        # With extra arguments, `fit` evaluates data that the chief reads already.
        if not extra:
            self._read_on_chief(bound, "batch_size", steps_per_epoch="steps")
        with self._dispatching():
            return type(self.model).evaluate(self.model, **bound, **extra)

    def _predict(self, *arguments: Any, **keywords: Any) -> Any:
        """`predict`, with data that the chief reads, and batches that workers predict."""
        bound = self._bind("predict", arguments, keywords)
        self._read_on_chief(bound, "batch_size", steps_per_epoch="steps")
        with self._dispatching():
            return type(self.model).predict(self.model, **bound)

    def _bind(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of a model's method, by name, including defaults."""
        bound = inspect.signature(getattr(type(self.model), method)).bind(self.model, *arguments, **keywords)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def _read_on_chief(self, bound: dict[str, Any], *names: str, **renamed: str) -> list[keras.callbacks.Callback]:
        """Replaces the data arguments with data read by the chief; returns the callbacks that it needs.

        Options for `distributed_dataset` are taken from the arguments `names`, or by another name as in `renamed`.
        """
        if isinstance(bound["x"], DistributedData):
            return []
        options = {name: bound[name] for name in names} | {name: bound[other] for name, other in renamed.items()}
        data = _on_chief(bound["x"], bound.get("y"), bound.get("sample_weight"), **options)
        bound["x"] = data
        bound.update({name: None for name in ("y", "sample_weight", "class_weight", "batch_size") if name in bound})
        return [FollowEpochs(data)]

    @contextlib.contextmanager
    def _dispatching(self) -> Generator[None]:
        """Context in which steps are dispatched to workers without waiting for each; leaves when all have ended."""
        self._served.install()
        self._served.waits = False
        try:
            yield
            self._dispatcher.join()
        finally:
            self._dispatcher.drain()
            self._served.waits = True


def _on_chief(*rows: Any, **options: Any) -> DistributedData:
    """Data that the chief reads, divided among no replicas."""
    return distributed_dataset(tf.distribute.get_strategy(), *rows, **options)


class _CheckModel(keras.callbacks.Callback):
    """Refuses a training step that callbacks before this one have changed."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        check_server_model(self.model)


def check_server_model(model: keras.Model) -> None:
    """Refuses a model that can't be trained with parameter servers."""
    strategy = model.distribute_strategy
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            f"The model was built under {strategy_name(strategy)}, so its weights are not on parameter servers. "
            "Build and compile it within `with dist.scope():`."
        )
    if not model.compiled:
        raise ValueError("The model has not been compiled. Write model.compile(...) before dist.prepare(model).")
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"Each worker has {strategy.num_replicas_in_sync} GPUs, but takes a step on only one. Start one worker per "
            "GPU: `python -m keras_paragrad launch --workers 2 --devices-per-worker 1 --ps 1 train.py`."
        )
    if model.jit_compile:
        raise ValueError(
            "The model was compiled with jit_compile=True, but XLA can't compile a step whose variables are on "
            "parameter servers. Write jit_compile=False."
        )
    if model.run_eagerly:
        raise ValueError(
            "The model was compiled with run_eagerly=True, but workers only run compiled steps. Write "
            'run_eagerly=False, or train with strategy="none" to debug a step.'
        )
    accumulator = find_accumulator(model.optimizer)
    if accumulator or accumulation_steps(model.optimizer) > 1:
        cause = type(accumulator).__name__ if accumulator else "gradient_accumulation_steps"
        raise ValueError(
            f"The optimizer accumulates gradients ({cause}), but workers step concurrently, and would mix up their "
            "windows. Compile with an optimizer that does not accumulate, and pass fit a larger batch_size."
        )
    if any(inner.use_ema and inner.ema_overwrite_frequency for inner in updating_optimizers(model.optimizer)):
        raise ValueError(
            "The optimizer overwrites the weights with their average (ema_overwrite_frequency), while other workers "
            "update them. Write ema_overwrite_frequency=None: the average then replaces the weights when fit ends."
        )
    if filled := StepBuilder.of(model).stages.filled:
        raise ValueError(
            f"The model's training step is modified ({', '.join(filled)}): by a callback, such as ExactAccumulation, "
            "by microbatch, or by another preparation. With parameter servers, workers take Keras's own step: leave "
            "them out, or undo() them."
        )
