"""Counts micro-batches on the host, which picks one of two compiled steps for each: with an update, or without.

A *window* is the micro-batches of one update; its *position* is how many of them have run.
"""

import contextlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer

_log = logging.getLogger("keras_paragrad")


class HostSchedule:
    """Fills the *apply* stage of a step: accumulates every micro-batch, and updates when the host says so.

    The host keeps its own count and does not wait for the device. At the start of an epoch it reads the window's
    position, so a restored window is resumed and data that ended early does not desynchronize the two.

    Args:
        optimizer: The optimizer whose windows are counted.

    Attributes:
        batches_left: How many batches are left in the epoch, or `None` if unknown.
        updates: How many windows of the epoch have ended with an update.
        prove: Whether the first batch is to prove that micro-batches give what the whole batch gives.
        always_whole: Whether every batch is a whole window, and needs no weight.
    """

    def __init__(self, optimizer: "AccumulatingOptimizer"):
        self.optimizer = optimizer
        self.batches_left: int | None = None
        self.updates = self._skipped = 0
        self.prove = True
        self.always_whole = False
        # The window's position and the number of updates, by the host's count.
        self._position = 0
        self._update = 0
        # Whether the two are up to date; if not, `plan` reads them from the optimizer.
        self._counting = False
        # The window's `restored` counter before the latest batches.
        self._restored: Any = None

    def begin_epoch(self, batches: int | None) -> None:
        """Begins an epoch of so many batches, `None` if unknown; its first one will read the optimizer's position."""
        self.batches_left = batches
        self.updates = self._skipped = 0
        self._counting = False

    @property
    def batches(self) -> int:
        """The number of batches of the next update."""
        return self.optimizer.schedule.at(int(self.optimizer.iterations.numpy()))

    def plan(self, batches: int) -> list[bool]:
        """Returns, for each of the next batches, whether it ends with an update; counts them."""
        if not self._counting:
            self._read()
        self._restored = self.optimizer.window.restored if self.optimizer.built else None
        # The epoch's last batch closes its window within the step: a custom `train_step` may do more after an update.
        last = self.batches_left if self.optimizer.tail == "flush" else None
        return [self._count(number == last) for number in range(1, batches + 1)]

    def _read(self) -> None:
        # Before the first batch, the optimizer may not be built.
        built = self.optimizer.built
        self._position = int(self.optimizer.window.position.numpy()) if built else 0
        self._update = int(self.optimizer.iterations.numpy())
        self._counting = True

    def _count(self, last: bool) -> bool:
        """Counts a batch, which may be the epoch's last; returns whether it ends with an update."""
        self._position += 1
        full = last or self._position >= self.optimizer.schedule.at(self._update)
        if full:
            self._position = 0
            self._update += 1
            self.updates += 1
        return full

    def updates_in(self, batches: int | None) -> int | None:
        """The number of updates in an epoch of so many batches that begins now; `None` if unknown."""
        if batches is None:
            return None
        self._read()
        self._counting = False
        tail, first, updates = self.optimizer.tail, self._update, 0
        left = batches + (self._position if tail == "carry" else 0)
        while left > 0:
            left -= self.optimizer.schedule.at(first + updates)
            updates += 1
        return updates - (left < 0 and tail != "flush")

    def count_skipped(self) -> int:
        """The number of the epoch's updates, with those among the batches that a resumed epoch has skipped."""
        if self._skipped:
            self._read()
            update, left, self._skipped = self._update, self._skipped - self._position, 0
            while left > 0:
                update -= 1
                left -= self.optimizer.schedule.at(update)
                self.updates += 1
        return self.updates

    def skipped(self, batches: int) -> None:
        """Counts batches that a resumed epoch has skipped, as they were trained on before."""
        self._skipped += batches
        if self.batches_left is not None:
            self.batches_left -= batches

    def abandoned(self, name: str) -> None:
        """Discards the window of a `fit` of the model `name` that failed, unless another was restored since."""
        if not self.optimizer.built or self._restored != self.optimizer.window.restored:
            return
        position = int(self.optimizer.window.position.numpy())
        if position:
            self.optimizer.discard()
            _log.warning(
                "The last fit of %s failed in the middle of an update: the gradients of %s micro-batch%s are dropped, "
                "and training goes on from the weights as they are now.",
                *(name, position, "es" if position > 1 else ""),
            )

    def ended(self, batches: int, exhausted: bool) -> None:
        """Counts batches that have run; closes the window if the epoch has ended, before any callback sees the weights.

        If `exhausted`, the data ended before the first of the planned batches.
        """
        if self.batches_left is not None:
            self.batches_left -= batches
        if exhausted or (self.batches_left is None and batches > 1):
            # The data may have ended before the last of them.
            planned = self._update
            self._read()
            self.updates -= planned - self._update
        if exhausted or (self.batches_left is not None and self.batches_left <= 0):
            self.end_epoch()
        elif self._position == 0 and not self.optimizer.schedule.is_constant:
            # A window without finite gradients makes no update, so the schedule does not advance.
            self._counting = False

    def end_epoch(self) -> None:
        """Closes the window according to the optimizer's `tail`; further calls in the same epoch do nothing."""
        if self._counting:
            self.updates += self.optimizer.end_epoch()
            self._counting = False

    def accumulate_only(self) -> contextlib.AbstractContextManager[object]:
        """The context in which the optimizer only accumulates."""
        return self.optimizer.accumulate_only()

    def end(self, update: bool) -> None:
        """Ends the micro-batch on this replica, with an update or without."""
        self.optimizer.end_micro_batch(update)
