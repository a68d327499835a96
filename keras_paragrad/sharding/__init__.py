"""Models that are too large for a device: layers that run again in the backward pass."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.sharding.recomputation import recompute

__all__ = ["recompute"]
__getattr__, __dir__ = lazily(__name__, {"recompute": "recomputation"})
