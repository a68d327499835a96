"""The result type of every derivative of a chunk of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Derivative(NamedTuple):
    """The derivative of a chunk of rows.

    Attributes:
        values: A tensor of shape `(rows, ...)` for each free input.
        sound: Whether they passed the checks.
    """

    values: Sequence[tf.Tensor]
    sound: tf.Tensor | bool = True
