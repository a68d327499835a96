"""Checks the rows passed to per-example functions and converts them to arrays."""

from typing import Any

import keras
import numpy as np

from keras_paragrad.arguments import refusal


def check_rows(name: str, nested: Any, *, optional: bool = False) -> Any:
    """Converts every leaf to an array of at least one row, and keeps the nesting.

    Args:
        name: The argument's name.
        nested: NumPy arrays, tensors or lists of numbers.
        optional: Whether a leaf may be `None`.

    Raises:
        ValueError: A leaf is something else, or an array without rows.
    """

    def check(leaf: Any) -> np.ndarray | None:
        if leaf is None and optional:
            return None
        try:
            rows = keras.ops.convert_to_numpy(leaf)
        except Exception:  # the backend's error for a value that is not an array
            rows = np.empty(0, object)
        if not rows.ndim or not len(rows) or rows.dtype == object:
            raise refusal(name, leaf, "arrays of shape (rows, ...), nested as the model takes them")
        return rows

    return keras.tree.map_structure(check, nested)
