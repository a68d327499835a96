"""Exact, fast parallel gradients for `model.fit`: plugins for Keras 3 on TensorFlow."""

import keras_paragrad._keras  # noqa: F401  (checks the installed Keras and TensorFlow before anything else)
from keras_paragrad.accumulation.callback import ExactAccumulation
from keras_paragrad.accumulation.microbatch import microbatch
from keras_paragrad.accumulation.optimizer import AccumulatingOptimizer

__all__ = ["AccumulatingOptimizer", "ExactAccumulation", "microbatch"]
__version__ = "0.1.0"
