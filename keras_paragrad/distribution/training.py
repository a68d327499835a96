"""Runs the `fit` of a prepared model, with the callbacks that replicas need and errors that name lost workers."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.accumulation.callback import ExactAccumulation
from keras_paragrad.compat.capabilities import accumulating
from keras_paragrad.compat.local import place_of
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.failures import explained_failures
from keras_paragrad.distribution.checkpoint.writers import with_one_writer
from keras_paragrad.distribution.consistency import AgreeEachEpoch, with_agreement
from keras_paragrad.distribution.data import DistributedData, FollowEpochs
from keras_paragrad.distribution.parallelism import PlannedRun


def train(
    run: PlannedRun,
    model: Any,
    data: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    arguments: dict[str, Any],
    verbose: Any,
) -> keras.callbacks.History:
    """Calls the `fit` of a prepared model."""
    hardware, plan, strategy = run.hardware, run.plan, run.strategies.workers
    sharded = data if isinstance(data, DistributedData) else None
    factor = plan.lr_scaling.value or float(strategy.num_replicas_in_sync)
    rate = [ScaledLearningRate(factor, plan.warmup_steps.value)] if factor != 1 else []
    alone = hardware.worker_count == 1 and place_of(strategy).workers == 1
    together = _arranged(model, sharded, rate, callbacks, None if alone else hardware.is_chief)
    if sharded is not None and place_of(strategy).workers > 1:
        together = with_agreement(together, AgreeEachEpoch(strategy, together, sharded))
    shown = verbose if hardware.is_chief or verbose != "auto" else 0
    try:
        with explained_failures(hardware.cluster):
            return model.fit(data, verbose=shown, callbacks=together, **arguments)
    finally:
        # Keras does not notify callbacks of a `fit` that failed.
        for callback in together:
            if isinstance(callback, (Backup, ScaledLearningRate)):
                callback.leave()


def _arranged(
    model: Any,
    data: DistributedData | None,
    rate: Sequence[keras.callbacks.Callback],
    callbacks: Sequence[keras.callbacks.Callback],
    is_chief: bool | None,
) -> list[keras.callbacks.Callback]:
    """All callbacks in order; a `Backup` comes last, as it saves the state of all others.

    Of several workers only the chief writes; `is_chief` is `None` if there is one.
    """
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    others = [callback for callback in callbacks if not isinstance(callback, Backup)]
    ours: list[keras.callbacks.Callback] = [FollowEpochs(data)] if data is not None else []
    if accumulating(model.optimizer) and not any(isinstance(callback, ExactAccumulation) for callback in others):
        ours.append(ExactAccumulation())
    written = [*ours, *rate, *others]
    written = written if is_chief is None else with_one_writer(written, is_chief)
    for backup in backups:
        backup.callbacks = [*backup.callbacks, *written]
    return [*written, *backups]


class ScaledLearningRate(keras.callbacks.Callback):
    """Scales the learning rate while `fit` runs, after a warm-up that starts at the unscaled rate.

    Args:
        factor: The factor of the rate.
        warmup_steps: Number of updates over which the rate grows to that, in equal steps.

    Raises:
        ValueError: When `fit` begins: the optimizer has a schedule, which has to be scaled where it is defined.

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD (2017), https://arxiv.org/abs/1706.02677: gradual warmup.
    """

    def __init__(self, factor: float, warmup_steps: int = 0):
        super().__init__()
        self.factor = factor
        self.warmup_steps = warmup_steps
        self._rate: float | None = None
        self._grows = False
        self._began = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Records the rate."""
        optimizer = self._optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        try:
            optimizer.learning_rate = rate
        except TypeError as error:
            raise ValueError(
                f"The learning rate of {optimizer.name} follows a schedule, which lr_scaling= can't scale. "
                f"Leave lr_scaling out, and multiply the schedule's rates by {self.factor:g}."
            ) from error
        self._rate, self._grows = rate, True
        self._began = int(optimizer.iterations.numpy())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next update during warm-up; afterwards other callbacks may change it."""
        if not self._grows or self._rate is None:
            return
        done = int(self._optimizer.iterations.numpy()) - self._began
        self._grows = done < self.warmup_steps
        share = done / self.warmup_steps if self._grows else 1.0
        self._optimizer.learning_rate = self._rate * (1 + (self.factor - 1) * share)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Divides the rate by the factor, so that the next `fit` starts unscaled."""
        self.leave()

    def leave(self) -> None:
        """Does the same once, also after a `fit` that failed with an error."""
        if self._rate is not None:
            rate = float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))
            self._optimizer.learning_rate = self._rate if self._grows else rate / self.factor
            self._rate = None

    @property
    def _optimizer(self) -> Any:
        model: Any = self.model
        return model.optimizer
