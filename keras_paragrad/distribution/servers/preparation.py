"""`fit`, `evaluate` and `predict` whose steps run on workers, with the weights on parameter servers."""

import contextlib
import inspect
from collections.abc import Generator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_integer
from keras_paragrad.compat.collectives import strategy_name
from keras_paragrad.compat.data import split_for_validation
from keras_paragrad.compat.optimizer import accumulation_steps, find_accumulator, updating_optimizers
from keras_paragrad.compat.types import Logs
from keras_paragrad.distribution.data import DistributedData, FollowEpochs, distributed_dataset
from keras_paragrad.distribution.parallelism import Preparation
from keras_paragrad.distribution.servers.dispatch import Dispatcher, PredictionAdapter
from keras_paragrad.engine.servers.server_model import ParameterServerModel
from keras_paragrad.engine.training.builder import StepBuilder


def prepare_for_servers(
    model: keras.Model,
    coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
    *,
    in_flight: int | None = None,
) -> "ServerPreparation":
    """Makes a model's own `fit`, `evaluate` and `predict` work under a `ParameterServerStrategy`.

    The chief reads the batches, and sends each to the next free worker: every example once per epoch, one update per
    batch. Workers don't wait for each other, so gradients are stale: training differs from training on one device, and
    between runs. Metrics and counters cover every example and update once; evaluation and prediction are exact.

    Args:
        model: A compiled model, built within the scope of a `ParameterServerStrategy`. Only this instance is changed.
        coordinator: Dispatches steps to the workers; by default the strategy's.
        in_flight: Number of batches queued or running; two per worker by default.

    Returns:
        A handle; `undo()` restores the methods of the model's class.

    Raises:
        ValueError: The model can't be trained with parameter servers. The message says what to write.

    Example, which connects the process to a cluster for good::

        strategy = servers.make_parameter_server_strategy(servers.in_process_cluster(workers=2, servers=1))
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", loss="mse")
        prepared = servers.prepare_for_servers(model)
        model.fit(np.ones((100, 8)), np.ones((100, 1)), epochs=2)
        int(model.optimizer.iterations)  # 8: batches of 32 rows, the last of 4
    """
    return ServerPreparation.of(model, coordinator, in_flight)


class ServerPreparation(Preparation):
    """A model prepared by `prepare_for_servers`.

    Attributes:
        model: The model.
    """

    changes_in_place = True

    def __init__(
        self,
        model: keras.Model,
        coordinator: tf.distribute.coordinator.ClusterCoordinator | None = None,
        in_flight: int | None = None,
    ):
        super().__init__(model, coordinator, in_flight)

    def renew(self) -> None:
        """Replaces `fit`, `evaluate` and `predict`, whose steps are dispatched to workers."""
        coordinator, in_flight = self.settings
        check_server_model(self.model)
        in_flight = check_integer("in_flight", in_flight, example=4, optional=True)
        coordinator = coordinator or tf.distribute.coordinator.ClusterCoordinator(self.model.distribute_strategy)
        self._dispatcher = Dispatcher(coordinator, count_workers(), in_flight)
        self._served = ParameterServerModel(self.model, self._dispatcher, lambda: check_server_model(self.model))
        self.replace(fit=self._fit, evaluate=self._evaluate, predict=self._predict)

    def stop(self) -> None:
        self._served.undo()

    def _fit(self, *arguments: Any, **keywords: Any) -> keras.callbacks.History:
        """`fit`, with data that the chief reads, and steps that workers take."""
        check_server_model(self.model)
        bound = self._bind("fit", arguments, keywords)
        if bound["validation_split"] and bound["validation_data"] is None:
            rows, bound["validation_data"] = split_for_validation(
                bound["x"], bound["y"], bound["sample_weight"], bound["validation_split"]
            )
            bound.update(zip(("x", "y", "sample_weight"), rows, strict=True), validation_split=0.0)
        callbacks = self._read_on_chief(bound, "batch_size", "shuffle", "class_weight", "steps_per_epoch")
        if bound["validation_data"] is not None:
            bound["validation_data"] = self._read_validation(bound)
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
        """`predict`, with batches that the chief reads and sends ahead to workers."""
        bound = self._bind("predict", arguments, keywords)
        self._read_on_chief(bound, "batch_size", steps_per_epoch="steps")
        self._build(bound["x"])
        bound["x"] = PredictionAdapter(bound["x"], self._served.predict_async, self._dispatcher.in_flight)
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
        data = distributed_dataset(
            tf.distribute.get_strategy(), bound["x"], bound.get("y"), bound.get("sample_weight"), **options
        )
        bound["x"] = data
        bound.update({name: None for name in ("y", "sample_weight", "class_weight", "batch_size") if name in bound})
        return [FollowEpochs(data)]

    def _read_validation(self, bound: dict[str, Any]) -> DistributedData:
        """The validation data as batches that the chief reads."""
        if isinstance(bound["validation_data"], DistributedData):
            return bound["validation_data"]
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(bound["validation_data"])
        return distributed_dataset(
            tf.distribute.get_strategy(),
            x,
            y,
            sample_weight,
            batch_size=bound["validation_batch_size"] or bound["batch_size"],
            steps_per_epoch=bound["validation_steps"],
        )

    def _build(self, data: DistributedData) -> None:
        """Builds an unbuilt model for the data's shapes."""
        if self.model.built:
            return
        x = keras.utils.unpack_x_y_sample_weight(data.batch_spec)[0]
        with self.model.distribute_strategy.scope():
            self.model(keras.tree.map_structure(lambda spec: keras.KerasTensor((None, *spec.shape[1:]), spec.dtype), x))

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


class _CheckModel(keras.callbacks.Callback):
    """Refuses a training step that callbacks before this one have changed."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        check_server_model(self.model)


def count_workers() -> int:
    """The number of workers that this chief is connected to."""
    devices = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    return len({device.task for device in devices if device.job == "worker"})


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
    _check_optimizer(model.optimizer)
    _check_stages(model)


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers that accumulate gradients, or overwrite weights with their averages."""
    accumulator = find_accumulator(optimizer)
    if accumulator or accumulation_steps(optimizer) > 1:
        cause = type(accumulator).__name__ if accumulator else "gradient_accumulation_steps"
        raise ValueError(
            f"The optimizer accumulates gradients ({cause}), but workers step concurrently, and would mix up their "
            "windows. Compile with an optimizer that does not accumulate, and pass fit a larger batch_size."
        )
    if any(inner.use_ema and inner.ema_overwrite_frequency for inner in updating_optimizers(optimizer)):
        raise ValueError(
            "The optimizer overwrites the weights with their average (ema_overwrite_frequency), while other workers "
            "update them. Write ema_overwrite_frequency=None: the average then replaces the weights when fit ends."
        )


def _check_stages(model: keras.Model) -> None:
    """Refuses a model whose step another component changes."""
    filled = StepBuilder.of(model).stages.filled
    if filled:
        raise ValueError(
            f"The model's training step is modified ({', '.join(filled)}): by a callback, such as ExactAccumulation, "
            "by microbatch, or by another preparation. With parameter servers, workers take Keras's own step: leave "
            "them out, or undo() them."
        )
