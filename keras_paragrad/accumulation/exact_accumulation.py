"""`ExactAccumulation`: gives an accumulating optimizer the micro-batch weights and epoch ends of `fit`.

A *window* is the micro-batches of one update. A `StepBuilder` makes the model's training step from *stages*; what a
component puts into a stage is its *filler*.
"""

import keras

from keras_paragrad.accumulation.advice import missing_accumulation_message
from keras_paragrad.accumulation.host import HostSchedule
from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
from keras_paragrad.arguments import check_flag
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import Logs
from keras_paragrad.engine.division.dividers import INSTEAD_OF_WINDOWS, Divider
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import warn_of_batch_statistics
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.indivisible import DeferredRefusal

DIVIDER = Divider(
    configured_by="AccumulatingOptimizer",
    parts="micro-batches",
    for_equal_parts="write AccumulatingOptimizer(..., weighting='uniform')",
    to_train_anyway="write AccumulatingOptimizer(..., weighting='uniform')",
    for_comparing_losses=INSTEAD_OF_WINDOWS,
    for_compiled_losses="microbatch(model, size) also takes losses that compare examples.",
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
        prove: Whether the first batch proves, before the first update, that its parts give the gradient of the whole.
            Built-in losses and layers known to be divisible aren't checked.

    Raises:
        ValueError: When `fit` begins: the model was not compiled with an `AccumulatingOptimizer`. In the first step:
            the weight of its micro-batches is unknown, as its loss compares examples or uses a divisor other than those
            tested. The message says what to write. With `steps=1` on one replica such a model is trained
            anyway, and this is logged once.

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

    def __init__(self, prove: bool = True):
        super().__init__()
        check_flag("prove", prove)
        check_internals("models", "steps")
        self.prove = prove
        self._schedule: HostSchedule | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Installs the weighting of micro-batches and the schedule of updates."""
        StepBuilder.of(self.model).begin_fit(self._fillers)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts counting the epoch's batches."""
        if self._schedule:
            self._schedule.begin_epoch(self.params.get("steps"))

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch, so that validation sees its update."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Closes a window left open by an interrupted epoch."""
        self._end_epoch()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restores the model's own training step."""
        if self._schedule:
            StepBuilder.of(self.model).end_fit(self._fillers)
            self._schedule = None

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
        self._schedule.prove = self.prove
        self._schedule.deferred_refusal = deferred_refusal = self._deferred_refusal(optimizer, normalize)
        if deferred_refusal:
            # What weighting micro-batches would refuse is only logged: whole windows need no weights.
            deferred_refusal.check(self.model)
            normalize = None
        else:
            if normalize:
                normalize.check(self.model)
            warn_of_batch_statistics(self.model)
        return {"combine": normalize, "apply": self._schedule}

    def _deferred_refusal(
        self, optimizer: AccumulatingOptimizer, normalize: LossNormalization | None
    ) -> DeferredRefusal | None:
        """The error that larger windows would raise, to be logged, if every batch is a whole window; else `None`."""
        opened = optimizer.built and int(optimizer.window.position.numpy()) > 0
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        if normalize is None or not optimizer.schedule.is_always_one or opened or replicas > 1:
            return None
        return DeferredRefusal(normalize, "is trained on whole batches. Two or more to an update")

    def _end_epoch(self) -> None:
        if self._schedule:
            self._schedule.end_epoch()


def accumulating_optimizer(model: keras.Model) -> AccumulatingOptimizer:
    """The `AccumulatingOptimizer` that a model was compiled with, unwrapped.

    Raises:
        ValueError: It was compiled with another optimizer, or has several. The message ends with the code to write.
    """
    optimizer = find_accumulator(model.optimizer)
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    raise ValueError(missing_accumulation_message(model))
