"""Models that are too large for a device: what a step takes, and layers that run again in the backward pass."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.memory.estimate import Estimate, estimate_memory
    from keras_paragrad.memory.recomputation import recompute

__all__ = ["Estimate", "estimate_memory", "recompute"]
__getattr__, __dir__ = lazily(
    __name__, {"Estimate": "estimate", "estimate_memory": "estimate", "recompute": "recomputation"}
)
