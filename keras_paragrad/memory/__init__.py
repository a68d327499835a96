"""Training within a device's memory: estimates a step's memory, and recomputes layers in the backward pass."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.memory.batch_size import BatchSize, find_batch_size
    from keras_paragrad.memory.estimate import Estimate, estimate_memory
    from keras_paragrad.memory.recomputation import recompute

__all__ = ["BatchSize", "Estimate", "estimate_memory", "find_batch_size", "recompute"]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "BatchSize": "batch_size",
        "Estimate": "estimate",
        "estimate_memory": "estimate",
        "find_batch_size": "batch_size",
        "recompute": "recomputation",
    },
)
