"""The batches of an epoch that a resumed training has seen."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.types import Batch


class SeenBatches:
    """Batches that a train function takes from the data without training on them.

    Attributes:
        left: The number of batches still to skip.
    """

    def __init__(self):
        self.left = 0
        self._then: Callable[[Batch], None] | None = None

    def expect(self, batches: int, then: Callable[[Batch], None] | None = None) -> None:
        """Skips the next batches, and then calls `then` with the last of them."""
        self.left, self._then = batches, then

    def skip(self, iterator: Any, limit: int) -> int:
        """Takes up to `limit` of the batches to skip from an iterator, and returns how many it has taken."""
        skipped, batch = min(self.left, limit), None
        try:
            for _ in range(skipped):
                batch = iterator.get_next() if hasattr(iterator, "get_next") else next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            # Otherwise the model's next `fit` would skip the rest.
            self.left = 0
            raise ValueError(
                "The data ended before the batch at which training was to resume. Give fit the data, batch_size and "
                "steps_per_epoch that it had, or give Backup another directory to begin anew."
            ) from None
        self.left -= skipped
        if skipped and not self.left and self._then:
            then, self._then = self._then, None
            then(batch)
        return skipped
