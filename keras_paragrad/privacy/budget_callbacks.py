"""The callbacks of a private `fit`: epsilon in the logs, and an end to training when the budget is spent."""

import logging
from collections.abc import Callable

import keras
import numpy as np

from keras_paragrad.compat.types import Logs
from keras_paragrad.privacy.accounting import ACCOUNTANTS
from keras_paragrad.privacy.budget import Privacy
from keras_paragrad.privacy.ledger import Entry

_log = logging.getLogger("keras_paragrad")


class UpdateCounter(keras.callbacks.Callback):
    """Starts or continues a run at each epoch, and counts updates on the host. Runs after callbacks that load weights.

    A run is a sequence of updates whose samples and noise are drawn with one key; its updates are numbered from 0.

    `begin` is `Releases.begin_epoch`, `skipped` returns how many batches an epoch skips because an interrupted `fit`
    trained on them, and `whole` says whether each epoch must have all of its updates.

    Attributes:
        first: Number of the epoch's first update.
        end: Number of the first update beyond the budget, or `None` without a budget.
        spent: The ledger's entries before this epoch.
    """

    def __init__(
        self, privacy: Privacy, begin: Callable[[], tuple[int, int]], skipped: Callable[[], int], *, whole: bool
    ):
        super().__init__()
        self.privacy, self._begin, self._skipped, self._whole = privacy, begin, skipped, whole
        # Numbers of the next update when the epoch began, and of the first one that isn't in the ledger yet.
        self._next, self._accounted = 0, 0
        self.first = 0
        self.end: int | None = None
        self.spent: list[Entry] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Reads from the ledger how many updates the budget has left, also after weights were loaded."""
        self._next, repeated = self._begin()
        self._accounted = self._next + repeated
        self.first = self._next - self._skipped()
        self.spent = self.privacy.entries()
        left = self.privacy.updates_left
        self.end = None if left is None else self._accounted + left
        if self.end == self._next:
            raise ValueError(self.privacy.spent_budget_message())
        if self.end is not None and self._whole and self.end < self.first + self.privacy.updates_per_epoch:
            raise ValueError(
                f"Weights were loaded within fit, and what they have released leaves {left} updates of the budget, "
                "less than an epoch. Load them before fit()."
            )

    def update_numbers(self) -> np.ndarray:
        """The numbers of the epoch's updates; skipped updates may have any, as their rows are never read."""
        last = self.first + self.privacy.updates_per_epoch
        return np.maximum(np.arange(self.first, last if self.end is None else min(last, self.end)), 0)

    def number_after(self, batch: int) -> int:
        """The number of the next update after a batch of the epoch, without waiting for the device."""
        # With steps_per_execution, Keras counts beyond the end of an epoch.
        return self.first + min(batch + 1, self.privacy.updates_per_epoch)

    def epsilon_after(self, batch: int) -> float:
        """Epsilon after a batch of the epoch, without waiting for the device."""
        return self.privacy.epsilon_of(self.spent, max(0, self.number_after(batch) - self._accounted))

    def end_of_fit(self, epoch: int) -> int:
        """The number of the first update beyond this `fit`, which is in the given epoch."""
        return self.first + (self.params["epochs"] - epoch) * self.privacy.updates_per_epoch


class EpsilonLogs(keras.callbacks.Callback):
    """Adds `epsilon` to the logs of callbacks after this one, and stops training when the budget is spent."""

    def __init__(self, privacy: Privacy, counter: UpdateCounter):
        super().__init__()
        self.privacy, self._counter = privacy, counter
        self._epsilon, self._epoch = 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Records the epoch's index."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Logs epsilon, and stops training after the last update of the budget."""
        counter, settings = self._counter, self.privacy.settings
        if ACCOUNTANTS[settings.accountant].fast:
            self._epsilon = counter.epsilon_after(batch)
        if logs is not None:
            logs["epsilon"] = self._epsilon
        if counter.end is None or self.model.stop_training:
            return
        if counter.end_of_fit(self._epoch) > counter.number_after(batch) >= counter.end:
            self.model.stop_training = True
            _log.warning(
                "%d updates were made, as many as make_private(target_epsilon=%g, epochs=%d) allows: training stops. "
                "To train longer, ask for more epochs there, which makes the noise larger.",
                *(self.privacy.updates, settings.target_epsilon, settings.epochs),
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Logs the epsilon of all updates, which may take a second with privacy loss distributions."""
        self._epsilon = self.privacy.epsilon
        if logs is not None:
            logs["epsilon"] = self._epsilon
