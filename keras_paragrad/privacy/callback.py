"""Epsilon in the logs of `fit`, and an end to training where the budget ends."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_paragrad.privacy.accounting.accountants import ACCOUNTANTS
from keras_paragrad.privacy.budget import Privacy
from keras_paragrad.privacy.ledger import Entry

_log = logging.getLogger("keras_paragrad")


class Epochs(keras.callbacks.Callback):
    """Goes on with a run, or begins one, at each epoch. It comes after callbacks that resume training or load weights.

    Args:
        privacy: The model's budget.
        begin: Returns the number of the next update, and how many from there on are counted already.
        skipped: Returns how many batches the epoch skips, as they were trained on before it was broken off.
        whole: Whether each epoch has to have all of its updates.

    Attributes:
        first: The number of the epoch's first update.
        end: The number before which the budget ends, or `None` without one.
        spent: What was released before this epoch.
    """

    def __init__(
        self, privacy: Privacy, begin: Callable[[], tuple[int, int]], skipped: Callable[[], int], *, whole: bool
    ):
        super().__init__()
        self.privacy, self._begin, self._skipped, self._whole = privacy, begin, skipped, whole
        self.first, self._next, self._counted = 0, 0, 0
        self.end: int | None = None
        self.spent: list[Entry] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sees what was released, also by weights that were just loaded.

        Raises:
            ValueError: They leave too little of the budget.
        """
        self._next, again = self._begin()
        self._counted = self._next + again
        self.first = self._next - self._skipped()
        self.spent = self.privacy.entries()
        left = self.privacy.updates_left
        self.end = None if left is None else self._counted + left
        if self.end == self._next:
            raise ValueError(self.privacy.spent_budget())
        if self.end is not None and self._whole and self.end < self.first + self.privacy.updates_per_epoch:
            raise ValueError(
                f"Weights were loaded within fit, and what they have released leaves {left} updates of the budget, "
                "less than an epoch. Load them before fit()."
            )

    def numbers(self) -> np.ndarray:
        """The numbers of the epoch's updates. Those that are skipped may be of another run: their rows don't matter."""
        last = self.first + self.privacy.updates_per_epoch
        return np.maximum(np.arange(self.first, last if self.end is None else min(last, self.end)), 0)

    def made_after(self, batch: int) -> int:
        """The number of updates after a batch of the epoch, without waiting for the device."""
        # With steps_per_execution, Keras counts beyond the end of an epoch.
        return self.first + min(batch + 1, self.privacy.updates_per_epoch)

    def epsilon_after(self, batch: int) -> float:
        """Epsilon after a batch of the epoch."""
        return self.privacy.epsilon_of(self.spent, max(0, self.made_after(batch) - self._counted))

    def ends(self, epoch: int) -> int:
        """The number of updates at which `fit` ends by itself."""
        return self.first + (self.params["epochs"] - epoch) * self.privacy.updates_per_epoch


class PrivacyLogs(keras.callbacks.Callback):
    """Adds `epsilon` to the logs that callbacks after this one are given, and stops training with the budget.

    Args:
        privacy: The model's budget.
        epochs: Counts on the host, which doesn't wait for the device.
    """

    def __init__(self, privacy: Privacy, epochs: Epochs):
        super().__init__()
        self.privacy, self._epochs = privacy, epochs
        self._shown, self._epoch = 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds epsilon, and stops training after the last update that the budget allows."""
        epochs, settings = self._epochs, self.privacy.settings
        made = epochs.made_after(batch)
        if ACCOUNTANTS[settings.accountant].fast:
            self._shown = epochs.epsilon_after(batch)
        if logs is not None:
            logs["epsilon"] = self._shown
        if epochs.end is not None and epochs.ends(self._epoch) > made >= epochs.end and not self.model.stop_training:
            self.model.stop_training = True
            _log.warning(
                "%d updates were made, as many as make_private(target_epsilon=%g, epochs=%d) allows: training stops. "
                "To train longer, ask for more epochs there, for which the noise is then larger.",
                *(self.privacy.updates, settings.target_epsilon, settings.epochs),
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds epsilon."""
        # With privacy loss distributions this takes a second, too long for each update.
        self._shown = self.privacy.epsilon
        if logs is not None:
            logs["epsilon"] = self._shown
