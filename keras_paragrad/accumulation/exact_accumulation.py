"""`ExactAccumulation`: gives an accumulating optimizer the micro-batch weights and epoch ends of `fit`.

A *window* is the micro-batches of one update. A `StepBuilder` makes the model's training step from *stages*; what a
component puts into a stage is its *filler*.
"""

from collections.abc import Iterable, Sequence

import keras

from keras_paragrad.accumulation.advice import missing_accumulation_message
from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
from keras_paragrad.arguments import check_each, check_flag, check_instance
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import Logs
from keras_paragrad.engine.losses.dividers import INSTEAD_OF_WINDOWS, Divider
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import warn_of_batch_statistics
from keras_paragrad.engine.training.builder import StepBuilder

DIVIDER = Divider(
    configured_by="AccumulatingOptimizer",
    parts="micro-batches",
    for_equal_parts="write AccumulatingOptimizer(..., weighting='uniform')",
    to_train_anyway="write AccumulatingOptimizer(..., weighting='uniform')",
    for_any_loss=INSTEAD_OF_WINDOWS,
    divides_steps=True,
)


class ExactAccumulation(keras.callbacks.Callback):
    """Makes `fit` with an `AccumulatingOptimizer` take the steps that one device takes on whole batches.

    Weights each micro-batch by its loss normalizer, so uneven and weighted micro-batches are exact. Closes an epoch's
    last window according to the optimizer's `tail`, before validation and before any other callback's `on_epoch_end`.
    Compiles separate steps for accumulating and for updating, and picks one on the host, so steps without an update
    don't pay for one. Works with `jit_compile`, `steps_per_execution`, strategies and data of unknown length. The
    model's own training step is restored when `fit` ends.

    Args:
        prove: Whether the first update's rows prove, before it and before each epoch, that parts of a batch give the
            gradient of the whole. What Keras itself defines, and is known to divide, isn't computed again.
        callbacks: Callbacks whose batches are updates: averages of weights, clips, rate finders. `on_train_batch_begin`
            and `on_train_batch_end` are called once an update, with its index and its logs, and `params["steps"]` is
            the number of updates in an epoch. `fit` shows those in its own `callbacks` every micro-batch.

    Raises:
        ValueError: One of `callbacks` isn't a Keras callback, or belongs to `fit`. When `fit` begins: the model was not
            compiled with an `AccumulatingOptimizer`. In the first step: the weight of its micro-batches is unknown,
            or they don't add up to the whole, as its loss or a layer compares examples. The message says what to write.
            With `steps=1` on one replica such a model is trained anyway.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import AccumulatingOptimizer, ExactAccumulation
    >>> def trained(batch_size, optimizer, callbacks):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile(optimizer, loss="mse")
    ...     x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    ...     model.fit(x, x[:, :1], batch_size=batch_size, shuffle=False, callbacks=callbacks, verbose=0)
    ...     return model.get_weights()[0]
    >>> whole = trained(10, "adam", [])
    >>> parts = trained(3, AccumulatingOptimizer("adam", steps=4), [ExactAccumulation()])  # 3 + 3 + 3 + 1 rows
    >>> bool(np.abs(whole - parts).max() < 1e-6)
    True
    """

    def __init__(self, prove: bool = True, callbacks: Sequence[keras.callbacks.Callback] = ()):
        super().__init__()
        check_flag("prove", prove)
        check_internals("models", "steps")
        self.prove = prove
        self.callbacks = list(check_each("callbacks", callbacks, _check_of_updates, "Keras callbacks"))
        self._schedule: HostSchedule | None = None
        # Whether the callbacks of updates were told of an update's begin, how many of the epoch's updates they have
        # seen end, and the logs of the latest micro-batch.
        self._begun, self._seen, self._logs = False, 0, {}

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, of the callbacks of updates too."""
        super().set_model(model)
        self._of_updates = keras.callbacks.CallbackList(self.callbacks, model=model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Installs the weighting of micro-batches and the schedule of updates."""
        StepBuilder.of(self.model).begin_fit(self._fillers)
        self._count_steps()
        self._of_updates.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts counting the epoch's batches."""
        if self._schedule:
            self._schedule.begin_epoch(self.params.get("steps"))
            self._begun, self._seen = False, 0
            self._count_steps()
        self._of_updates.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begins an update, unless the micro-batch continues its window."""
        if self._schedule and self.callbacks and not self._begun and not StepBuilder.of(self.model).batches_to_skip:
            self._begun, self._seen = True, self._schedule.count_skipped()
            self._of_updates.on_train_batch_begin(self._seen, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends an update, if the micro-batch was its window's last."""
        self._logs = logs
        self._end_update()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch, so that validation sees its update."""
        self._end_epoch()
        self._of_updates.on_test_begin(logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begins a batch of validation."""
        self._of_updates.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends a batch of validation."""
        self._of_updates.on_test_batch_end(batch, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Ends validation."""
        self._of_updates.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch."""
        self._end_epoch()
        self._of_updates.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restores the model's own training step."""
        if self._schedule:
            StepBuilder.of(self.model).end_fit(self._fillers)
            self._schedule = None
        self._of_updates.on_train_end(logs)

    def _fillers(self) -> dict[str, object]:
        """The fillers by stage, for the optimizer that the model is compiled with now.

        `StepBuilder` calls this when `fit` begins, and again if a callback calls `compile`.
        """
        optimizer = accumulating_optimizer(self.model)
        normalize = None if optimizer.weighting == "uniform" else LossNormalization(optimizer.weighting, DIVIDER)
        before, self._schedule = self._schedule, optimizer.host_schedule
        if before not in (None, self._schedule):
            # A callback has compiled the model with another optimizer in the middle of an epoch.
            self._schedule.begin_epoch(before.batches_left)
            self._schedule.updates = before.updates
        self._schedule.prove = self.prove
        opened = optimizer.built and int(optimizer.window.position.numpy()) > 0
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        # Whole windows need no weights.
        always_whole = normalize is not None and optimizer.schedule.is_always_one and not opened and replicas == 1
        self._schedule.always_whole = always_whole
        if always_whole:
            normalize = None
        else:
            if normalize:
                normalize.check(self.model)
            warn_of_batch_statistics(self.model)
        return {"combine": normalize, "apply": self._schedule}

    def _count_steps(self) -> None:
        """Tells the callbacks of updates how many an epoch has."""
        steps = self._schedule.updates_in(self.params.get("steps")) if self._schedule else None
        self._of_updates.set_params({**self.params, "steps": steps})

    def _end_update(self) -> None:
        """Tells the callbacks of updates of those that ended since they were last told."""
        if self._schedule and self._schedule.updates > self._seen and self._begun:
            self._begun, self._seen = False, self._schedule.updates
            self._of_updates.on_train_batch_end(self._seen - 1, self._logs)

    def _end_epoch(self) -> None:
        if self._schedule:
            self._schedule.end_epoch()
            self._end_update()


def _check_of_updates(name: str, callback: object) -> keras.callbacks.Callback:
    """Checks one of `ExactAccumulation(callbacks=...)`."""
    checked = check_instance(name, callback, keras.callbacks.Callback, "a Keras callback")
    if any(base.__module__.startswith("keras_paragrad.") for base in type(checked).__mro__):
        raise ValueError(
            f"`{name}` is {type(checked).__name__}, which counts micro-batches itself. Pass it to fit() beside "
            "ExactAccumulation(...): callbacks=[ExactAccumulation(...), this]."
        )
    return checked


def with_those_of_updates(callbacks: Iterable[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Callbacks of `fit`, and those that an `ExactAccumulation` among them calls."""
    return [
        each
        for callback in callbacks
        for each in (callback, *(callback.callbacks if isinstance(callback, ExactAccumulation) else ()))
    ]


def accumulating_optimizer(model: keras.Model) -> AccumulatingOptimizer:
    """The `AccumulatingOptimizer` that a model was compiled with, unwrapped.

    Raises:
        ValueError: It was compiled with another optimizer, or has several. The message ends with the code to write.
    """
    optimizer = find_accumulator(model.optimizer)
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    raise ValueError(missing_accumulation_message(model))
