"""Epsilon in the logs of `fit`, and an end to training where the budget ends."""

import logging
from collections.abc import Callable
from typing import Any

import keras

from keras_paragrad.privacy.budget import Privacy

_log = logging.getLogger("keras_paragrad")


class Epochs(keras.callbacks.Callback):
    """Notes with which update an epoch begins. It comes after callbacks that resume training.

    Args:
        privacy: The model's budget.
        skipped: Returns how many batches the epoch skips, as they were trained on before it was broken off.

    Attributes:
        first: The number of the epoch's first update.
    """

    def __init__(self, privacy: Privacy, skipped: Callable[[], int]):
        super().__init__()
        self.privacy, self._skipped = privacy, skipped
        self.first = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads how many updates were made."""
        self.first = self.privacy.updates - self._skipped()


class PrivacyLogs(keras.callbacks.Callback):
    """Adds `epsilon` to the logs that callbacks after this one are given, and stops training with the budget.

    Args:
        privacy: The model's budget.
        epochs: Counts on the host, which doesn't wait for the device.
        ends: The number of updates at which `fit` ends by itself.
    """

    def __init__(self, privacy: Privacy, epochs: Epochs, ends: int):
        super().__init__()
        self.privacy, self._epochs, self._ends = privacy, epochs, ends
        self._shown = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds epsilon, and stops training after the last update that the budget allows."""
        # With steps_per_execution, Keras counts beyond the end of an epoch.
        made = self._epochs.first + min(batch + 1, self.privacy.updates_per_epoch)
        planned = self.privacy.planned_updates
        if self.privacy.settings.accountant == "rdp":
            self._shown = self.privacy.epsilon_after(made)
        if logs is not None:
            logs["epsilon"] = self._shown
        if planned is not None and self._ends > made >= planned and not self.model.stop_training:
            self.model.stop_training = True
            _log.warning(
                "%d updates were made, as many as make_private(target_epsilon=%g, epochs=%d) allows: training stops. "
                "To train longer, ask for more epochs there, for which the noise is then larger.",
                *(planned, self.privacy.settings.target_epsilon, self.privacy.settings.epochs),
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds epsilon."""
        # With privacy loss distributions this takes a second, too long for each update.
        self._shown = self.privacy.epsilon
        if logs is not None:
            logs["epsilon"] = self._shown
