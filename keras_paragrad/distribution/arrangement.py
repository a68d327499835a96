"""The callbacks of a `fit` on replicas: the user's, those added to them, and their order."""

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
        model: The model to train.
        data: The training data; `None` if the model reads it itself.
        callbacks: The user's; those that write files do so on the chief only.
        is_chief: Whether this process is the one that writes.
        rate_factor: The factor of the learning rate.
        warmup_steps: Number of updates over which the rate grows to that.

    Returns:
        All callbacks in order: a `Backup` comes last, as it saves the state of all others.
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
    """Cleans up after a `fit` that failed, of which Keras does not notify callbacks."""
    for callback in callbacks:
        if isinstance(callback, Backup):
            callback.leave()
