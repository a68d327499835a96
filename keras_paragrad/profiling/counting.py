"""Counts the batches that an epoch really had, if calls run several."""

from typing import Any

from keras_paragrad.profiling.updates import UpdateCount


class EpochCount:
    """Corrects the batch count at the end of an epoch, whose last call may have got fewer batches than requested.

    Args:
        optimizer: The optimizer, whose counter is read if the epoch's length is unknown.
        per_call: Batches requested per call.
        steps: Batches per epoch, or `None` if unknown.
        began: Batches that had run when the epoch began.
    """

    def __init__(self, optimizer: Any, per_call: int, steps: int | None, began: int):
        self._per_call = per_call
        self._steps = steps
        self._began = began
        self._optimizer = optimizer
        self._counted = self._count()

    def corrected(self, batches: int) -> int:
        """How many batches have run in all.

        Args:
            batches: Batches requested by the calls.
        """
        if self._per_call == 1:
            return batches
        if self._steps:
            return min(batches, self._began + self._steps)
        counted = self._count()
        if counted is None or self._counted is None:
            return batches
        return min(batches, self._began + counted - self._counted)

    def _count(self) -> int | None:
        known = self._per_call == 1 or self._steps
        return None if known else UpdateCount(self._optimizer).batches
