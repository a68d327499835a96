"""Training within a device's memory: estimates a step's memory, and recomputes layers in the backward pass."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.memory.batch_size import find_batch_size as find_batch_size
    from keras_paragrad.memory.estimate import Estimate as Estimate
    from keras_paragrad.memory.estimate import estimate_memory as estimate_memory
    from keras_paragrad.memory.recomputation import recompute as recompute

__getattr__, __dir__, __all__ = lazily(__name__)
