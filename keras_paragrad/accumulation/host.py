"""The host's count of micro-batches: it decides which of two compiled steps a micro-batch takes."""

import contextlib
from typing import TYPE_CHECKING, Any

from keras_paragrad._keras.step.gradient import Gradient
from keras_paragrad._keras.step.uncut import Foreseen

if TYPE_CHECKING:
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer


class HostSchedule:
    """Fills the *combine* and *apply* stages: gathers every micro-batch, and updates where the host says so.

    The host counts for itself and does not wait for the device; at the beginning of an epoch it reads where the window
    is, so that a restored window goes on, and data that ended early does no harm.

    Args:
        optimizer: The optimizer whose windows it counts.

    Attributes:
        batches_left: How many batches are left of the epoch, or `None` if that isn't known.
        foreseen: Where each batch makes an update by itself, says what several would refuse.
    """

    def __init__(self, optimizer: "AccumulatingOptimizer"):
        self.optimizer = optimizer
        self.batches_left: int | None = None
        self.foreseen: Foreseen | None = None
        self._position = 0
        self._update = 0
        self._counting = False

    def begin_epoch(self, batches: int | None) -> None:
        """Reads where the optimizer stands.

        Args:
            batches: How many batches the epoch has, or `None` if that isn't known.
        """
        self.batches_left = batches
        self._counting = False

    def plan(self, batches: int) -> list[bool]:
        """Whether each of the next batches ends with an update."""
        if not self._counting:
            self._read()
        return [self._count() for _ in range(batches)]

    def _read(self) -> None:
        # Before the first batch of all there may be nothing to read.
        built = self.optimizer.built
        self._position = int(self.optimizer.window.position.numpy()) if built else 0
        self._update = int(self.optimizer.iterations.numpy())
        self._counting = True

    def _count(self) -> bool:
        self._position += 1
        full = self._position >= self.optimizer.schedule.at(self._update)
        if full:
            self._position = 0
            self._update += 1
        return full

    def skipped(self, batches: int) -> None:
        """Leaves out batches that training has seen already."""
        if self.batches_left is not None:
            self.batches_left -= batches

    def ended(self, batches: int, exhausted: bool) -> None:
        """Closes the window where the epoch has ended, before any callback sees the weights."""
        if self.batches_left is not None:
            self.batches_left -= batches
        if exhausted or (self.batches_left is not None and self.batches_left <= 0):
            self.end_epoch()
        elif self._position == 0 and not self.optimizer.schedule.is_constant:
            # A window in which nothing was finite makes no update, and then the schedule stays where it was.
            self._counting = False

    def end_epoch(self) -> None:
        """Closes the window as the optimizer's `tail` says, unless this epoch's has been closed."""
        if self._counting:
            self.optimizer.end_epoch()
            self._counting = False

    def gathering(self, gradient: Gradient | None) -> contextlib.AbstractContextManager[Any]:
        """The context in which the optimizer gathers a gradient by its weight."""
        return self.optimizer.gathering(gradient and gradient.weight)

    def end(self, update: bool) -> None:
        """Ends the micro-batch on this replica."""
        self.optimizer.end_micro_batch(update)
