"""`ExactAccumulation`: what an accumulating optimizer can't see for itself, told to it during `fit`."""

from typing import Any

import keras

from keras_paragrad._keras.losses.normalization import LossNormalization, warn_of_batch_statistics
from keras_paragrad._keras.objects.capabilities import accumulating
from keras_paragrad._keras.step.builder import StepBuilder
from keras_paragrad._keras.step.uncut import Foreseen
from keras_paragrad.accumulation.advice import advice
from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer


class ExactAccumulation(keras.callbacks.Callback):
    """Makes `fit` with an `AccumulatingOptimizer` take the steps that one device takes on whole batches.

    It measures what each micro-batch counts for, so that uneven and weighted ones are exact; closes an epoch's last
    window before validation and before any other callback sees the epoch's end, as the optimizer's `tail` says; and
    compiles a step that only accumulates apart from one that updates, between which the host picks, so that an update
    costs nothing where none is made. Works with `jit_compile`, `steps_per_execution`, strategies and data of unknown
    length. The model is as it was when `fit` is over.

    Raises:
        ValueError: When `fit` begins: the model was not compiled with an `AccumulatingOptimizer`, or the weight of its
            micro-batches can't be known because it has a `train_step` or loss of its own. The message says what to
            write. With `steps=1` on one replica it is trained, with a log message that says so once.

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

    def __init__(self):
        super().__init__()
        self._schedule: HostSchedule | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Takes over the weighing and the timing of the optimizer's updates."""
        optimizer = accumulating_optimizer(self.model)
        measure = None if optimizer.weighting == "uniform" else LossNormalization(optimizer.weighting)
        self._schedule = optimizer.host_schedule
        self._schedule.foreseen = foreseen = self._foreseen(optimizer, measure)
        if foreseen:
            foreseen.check(self.model)
            measure = None
        else:
            if measure:
                measure.check(self.model)
            warn_of_batch_statistics(self.model)
        builder = StepBuilder.of(self.model)
        builder.fill(combine=measure, apply=self._schedule)
        builder.build()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins the count of an epoch's batches."""
        if self._schedule:
            self._schedule.begin_epoch(self.params.get("steps"))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Closes a window that a broken off epoch left open, so that validation sees its update."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Closes a window that a broken off epoch left open."""
        self._end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the model its own training step back."""
        if self._schedule:
            StepBuilder.of(self.model).fill(combine=None, apply=None)
            self._schedule = None

    def _foreseen(self, optimizer: AccumulatingOptimizer, measure: LossNormalization | None) -> Foreseen | None:
        """Says what larger windows would refuse, where each batch makes an update and none has been left open."""
        alone = optimizer.schedule.is_constant and optimizer.schedule.at(0) == 1
        opened = optimizer.built and int(optimizer.window.position.numpy()) > 0
        if measure is None or not alone or opened or self.model.distribute_strategy.num_replicas_in_sync > 1:
            return None
        return Foreseen(measure, "is trained on whole batches. Two or more to an update")

    def _end_epoch(self) -> None:
        if self._schedule:
            self._schedule.end_epoch()


def accumulating_optimizer(model: keras.Model) -> AccumulatingOptimizer:
    """The `AccumulatingOptimizer` that a model was compiled with, out of what is around it.

    Raises:
        ValueError: It was compiled with another optimizer, or has several. The message ends with the lines to write.
    """
    optimizer = accumulating(model.optimizer)
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    raise ValueError(advice(model))
