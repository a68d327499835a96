"""How many batches an epoch really had, where calls run several."""

from typing import Any

from keras_paragrad.profiling.updates import UpdateCount


class EpochCount:
    """Corrects a count of batches at the end of an epoch: its last call may have had fewer than it asked for.

    Args:
        optimizer: The optimizer, which is asked where the epoch's length isn't known.
        per_call: How many batches a call asks for.
        steps: How many batches an epoch has, or `None` if that isn't known.
        began: How many batches had run when the epoch began.
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
            batches: How many the calls asked for.
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
