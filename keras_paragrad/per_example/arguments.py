"""The rows that are given to per-example functions, checked and as arrays."""

from typing import Any

import keras
import numpy as np

from keras_paragrad.arguments import refusal


def check_rows(name: str, nested: Any, *, optional: bool = False) -> Any:
    """Arrays of one or more rows, nested as they are given.

    Args:
        name: The argument's name.
        nested: NumPy arrays, tensors or lists of numbers.
        optional: Whether there may be `None` in place of one.

    Raises:
        ValueError: There is something else in it, or an array without rows.
    """

    def check(leaf: Any) -> np.ndarray | None:
        if leaf is None and optional:
            return None
        try:
            rows = keras.ops.convert_to_numpy(leaf)
        except Exception:  # whatever a backend raises for what is no array
            rows = np.empty(0, object)
        if not rows.ndim or not len(rows) or rows.dtype == object:
            raise refusal(name, leaf, "arrays of shape (rows, ...), nested as the model takes them")
        return rows

    return keras.tree.map_structure(check, nested)
