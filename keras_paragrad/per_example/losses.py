"""Losses that have no per-example gradients, because they are no sums over the examples."""

import numpy as np
import keras
import tensorflow as tf

from keras_paragrad._keras.losses import LossTerm


def check_term(term: LossTerm) -> None:
    """Refuses a loss that is no sum over the examples."""
