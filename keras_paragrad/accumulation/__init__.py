"""Gradient accumulation: one update from several micro-batches."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer
    from keras_paragrad.accumulation.slices import microbatch

__all__ = [
    "AccumulatingOptimizer",
    "ExactAccumulation",
    "microbatch",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "AccumulatingOptimizer": "optimizer",
        "ExactAccumulation": "exact_accumulation",
        "microbatch": "slices",
    },
)
