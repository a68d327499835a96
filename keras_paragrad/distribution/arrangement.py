"""The callbacks of a `fit` on replicas: the user's, what goes with them, and in which order."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad._keras.objects.capabilities import accumulating
from keras_paragrad.accumulation.callback import ExactAccumulation
from keras_paragrad.distribution.checkpoint.backup import Backup
from keras_paragrad.distribution.checkpoint.writers import with_one_writer
from keras_paragrad.distribution.data import DistributedData, FollowEpochs
from keras_paragrad.distribution.learning_rate import ScaledLearningRate


def arranged(
    model: Any,
    data: DistributedData | None,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    is_chief: bool,
    rate_factor: float = 1.0,
    warmup_steps: int = 0,
) -> list[keras.callbacks.Callback]:
    """Adds what `fit` needs on replicas to a user's callbacks.

    Args:
        model: The model that is trained.
        data: What it is trained on; `None` if that is read by the model.
        callbacks: The user's; of those that write files, only the chief's do.
        is_chief: Whether this process is the one that writes.
        rate_factor: What to multiply the learning rate with.
        warmup_steps: Over how many updates it grows to that.

    Returns:
        All callbacks in order: a `Backup` comes last, as it keeps the state of all others.
    """
    backups = [callback for callback in callbacks if isinstance(callback, Backup)]
    others = [callback for callback in callbacks if not isinstance(callback, Backup)]
    ours: list[keras.callbacks.Callback] = [FollowEpochs(data)] if data is not None else []
    if accumulating(model.optimizer) and not any(isinstance(callback, ExactAccumulation) for callback in others):
        ours.append(ExactAccumulation())
    if rate_factor != 1:
        ours.append(ScaledLearningRate(rate_factor, warmup_steps))
    written = with_one_writer([*ours, *others], is_chief)
    for backup in backups:
        backup.callbacks = [*backup.callbacks, *written]
    return [*written, *backups]


def leave(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Ends what a `fit` that has broken off has left open; Keras does not tell callbacks."""
    for callback in callbacks:
        if isinstance(callback, Backup):
            callback.leave()
