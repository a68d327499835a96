"""Rows that are made up, for what has to be known before there is data."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.trials.trial import MOST_ELEMENTS, Inconclusive

# The sizes to try for axes of unknown size: a short sequence, then an image that can be halved often.
SIZES = (8, 64)


def synthetic_rows(
    nested: Structure,
    rows: int,
    *,
    seed: int,
    size: int = 8,
    low: float = 0.1,
    high: float = 0.9,
    labels: bool = False,
    tokens: int = 2,
) -> Any:
    """Draws eager tensors with the shapes and dtypes of a batch: real numbers, and 0 or 1, valid classes and tokens.

    Args:
        nested: Tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`; some may be `None`.
        rows, seed, size: The number of rows, the seed of the draw, the size of axes of unknown size.
        low, high: Range of real numbers.
        labels: Whether real numbers are 0 or 1 too: Keras casts classes to float.
        tokens: Integers are below this.

    Raises:
        Inconclusive: A tensor holds strings, is sparse or ragged, or is very large.
    """
    generator = np.random.default_rng(seed)

    def draw(tensor: Any) -> tf.Tensor | None:
        if tensor is None:
            return None
        if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)) or not tensor.shape.rank:
            raise Inconclusive(f"data that isn't dense or has no rows: {type(tensor).__name__}")
        shape = [rows, *(size if length is None else length for length in tensor.shape[1:])]
        real = tensor.dtype.is_floating
        if np.prod(shape) > MOST_ELEMENTS or not (real or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise Inconclusive(f"data of type {tensor.dtype.name} and shape {tuple(shape)}, which can't be drawn")
        values = generator.uniform(low, high, shape) if real and not labels else generator.integers(0, tokens, shape)
        return tf.cast(values, tensor.dtype)

    return keras.tree.map_structure(draw, nested)
