"""Maps batches to optimizer updates, counted on the host to avoid device synchronization."""

from typing import Any

import keras

from keras_paragrad._keras.objects.capabilities import accumulating, updating
from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer


class UpdateCount:
    """Counts batches into updates: reads the optimizer's position once, then follows its schedule.

    Args:
        optimizer: The optimizer that a model was compiled with.

    Attributes:
        update: The update that the next batch belongs to, counted from 0.
        position: How many batches of that update have run.
        each: How many batches the update takes.

    Example:

    >>> import keras
    >>> from keras_paragrad.profiling.updates import UpdateCount
    >>> count = UpdateCount(keras.optimizers.SGD(gradient_accumulation_steps=3))
    >>> count.advance(4)
    >>> count.update, count.position, count.left
    (1, 1, 2)
    """

    def __init__(self, optimizer: Any):
        known = isinstance(optimizer, keras.optimizers.Optimizer)
        self._optimizer: Any = (accumulating(optimizer) or updating(optimizer)) if known else None
        self.update = self.position = 0
        self.each = 1
        self.read()

    def read(self) -> None:
        """Reads the optimizer's position, which waits for the device."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        if isinstance(optimizer, AccumulatingOptimizer):
            self.update = int(optimizer.iterations.numpy())
            self.position = int(optimizer.window.position.numpy()) if optimizer.built else 0
        elif optimizer.gradient_accumulation_steps:
            self.update, self.position = divmod(self._counted(), optimizer.gradient_accumulation_steps)
        else:
            self.update, self.position = self._counted(), 0
        self.each = self._takes(self.update)

    def _counted(self) -> int:
        # An optimizer's first variable counts its calls, even if `iterations` is overridden.
        return int(self._optimizer.variables[0].numpy()) if self._optimizer is not None else 0

    def _takes(self, update: int) -> int:
        optimizer = self._optimizer
        if isinstance(optimizer, AccumulatingOptimizer):
            return optimizer.schedule.at(update)
        return (optimizer.gradient_accumulation_steps if optimizer is not None else None) or 1

    @property
    def left(self) -> int:
        """How many batches the update still needs."""
        return max(self.each - self.position, 1)

    @property
    def batches(self) -> int | None:
        """How many batches the optimizer has seen, or `None` if it doesn't count them; waits for the device."""
        return None if isinstance(self._optimizer, AccumulatingOptimizer) or not self._optimizer else self._counted()

    def advance(self, batches: int) -> None:
        """Counts batches that have run."""
        for _ in range(batches):
            self.position += 1
            if self.position >= self.each:
                self.update, self.position = self.update + 1, 0
                self.each = self._takes(self.update)
