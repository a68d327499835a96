"""Runs the `fit` of a prepared model, with the callbacks that replicas need and errors that name lost workers."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad._keras.objects.capabilities import accumulating
from keras_paragrad._keras.replicas.local import place_of
from keras_paragrad.accumulation.callback import ExactAccumulation
from keras_paragrad.distribution.alike import AgreeEachEpoch, with_agreement
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.failures import explained_failures
from keras_paragrad.distribution.checkpoint.writers import with_one_writer
from keras_paragrad.distribution.data import DistributedData, FollowEpochs
from keras_paragrad.distribution.learning_rate import ScaledLearningRate
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
