"""Counts batches and optimizer updates on the host, to avoid device synchronization."""

from typing import Any

import keras

from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
from keras_paragrad.compat.optimizer import find_accumulator, innermost_optimizer


class UpdateCount:
    """Counts batches into updates: reads the optimizer's position once, then follows its schedule.

    Args:
        optimizer: The optimizer that a model was compiled with.

    Attributes:
        update: The update that the next batch belongs to, counted from 0.
        position: The number of batches of this update that have run.
        batches_per_update: How many batches the update takes.

    Example:

    >>> import keras
    >>> from keras_paragrad.profiling.updates import UpdateCount
    >>> count = UpdateCount(keras.optimizers.SGD(gradient_accumulation_steps=3))
    >>> count.advance(4)
    >>> count.update, count.position, count.left
    (1, 1, 2)
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer | None):
        known = isinstance(optimizer, keras.optimizers.Optimizer)
        self._optimizer: Any = (find_accumulator(optimizer) or innermost_optimizer(optimizer)) if known else None
        self.update = self.position = 0
        self.batches_per_update = 1
        self.read()

    def read(self) -> None:
        """Reads `update` and `position` from the optimizer, which waits for the device."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if isinstance(optimizer, AccumulatingOptimizer):
            self.update = int(optimizer.iterations.numpy())
            self.position = int(optimizer.window.position.numpy()) if optimizer.built else 0
        elif optimizer.gradient_accumulation_steps:
            self.update, self.position = divmod(self._batches_seen(), optimizer.gradient_accumulation_steps)
        else:
            self.update, self.position = self._batches_seen(), 0
        self.batches_per_update = self._batches_of(self.update)

    def _batches_seen(self) -> int:
        # An optimizer's first variable counts its calls, even if `iterations` is overridden.
        return int(self._optimizer.variables[0].numpy()) if self._optimizer is not None else 0

    def _batches_of(self, update: int) -> int:
        optimizer = self._optimizer
        if isinstance(optimizer, AccumulatingOptimizer):
            return optimizer.schedule.at(update)
        return (optimizer.gradient_accumulation_steps if optimizer is not None else None) or 1

    @property
    def left(self) -> int:
        """How many batches the update still needs."""
        return max(self.batches_per_update - self.position, 1)

    @property
    def batches(self) -> int | None:
        """How many batches the optimizer has seen, or `None` if it doesn't count them; waits for the device."""
        if self._optimizer is None or isinstance(self._optimizer, AccumulatingOptimizer):
            return None
        return self._batches_seen()

    def advance(self, batches: int) -> None:
        """Counts a number of batches that have run, without waiting for the device."""
        for _ in range(batches):
            self.position += 1
            if self.position >= self.batches_per_update:
                self.update, self.position = self.update + 1, 0
                self.batches_per_update = self._batches_of(self.update)


class BatchesOfEpoch:
    """Corrects the batch count at the end of an epoch, whose last call may have got fewer batches than requested.

    Args:
        optimizer: The optimizer, whose counter is read if the epoch's length is unknown.
        per_call: Batches requested per call.
        steps: Batches per epoch, or `None` if unknown.
        start: Batches that had run when the epoch began.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer | None, per_call: int, steps: int | None, start: int):
        self._per_call = per_call
        self._steps = steps
        self._start = start
        self._optimizer = optimizer
        self._seen_at_start = self._count()

    def correct(self, batches: int) -> int:
        """The number of batches that have run, if calls requested `batches`."""
        if self._per_call == 1:
            return batches
        if self._steps:
            return min(batches, self._start + self._steps)
        seen = self._count()
        if seen is None or self._seen_at_start is None:
            return batches
        return min(batches, self._start + seen - self._seen_at_start)

    def _count(self) -> int | None:
        is_needed = self._per_call > 1 and not self._steps
        return UpdateCount(self._optimizer).batches if is_needed else None
