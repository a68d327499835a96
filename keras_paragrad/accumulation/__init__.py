"""Gradient accumulation: one update from several micro-batches."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.accumulation.exact_accumulation import ExactAccumulation as ExactAccumulation
    from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer as AccumulatingOptimizer
    from keras_paragrad.accumulation.slices import microbatch as microbatch

__getattr__, __dir__, __all__ = lazily(__name__)
