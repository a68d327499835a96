"""Labels, one for each row: they pick the entry of a row's output that is differentiated, such as its own class."""

from typing import Any

import numpy as np

from keras_paragrad.arguments import refusal
from keras_paragrad.inputs.rows import arrays_of, is_batched


def checked_labels(value: Any) -> np.ndarray | None:
    """Labels as an int32 array of shape `(rows,)`, or `None` if `value` is neither an array nor a sequence.

    Raises:
        ValueError: It is one, but does not hold a nonnegative integer per row.
    """
    found = _array(value)
    if found is None or found.ndim == 0:
        return None
    if found.ndim > 1 and found.shape[1:] != (1,):
        one_hot = found.ndim == 2 and found.shape[1] > 1
        advice = " Write np.argmax(labels, axis=-1) for one-hot labels." if one_hot else ""
        raise ValueError(f"`output` has shape {found.shape}, and labels must have shape (rows,) or (rows, 1).{advice}")
    if found.dtype.kind not in "iu":
        advice = " If they are whole numbers, write labels.astype('int32')." if found.dtype.kind == "f" else ""
        raise ValueError(f"`output` has labels of dtype {found.dtype}, which must be integers.{advice}")
    if not found.size:
        raise ValueError("`output` has no labels. Pass one per row.")
    if found.min() < 0 or found.max() > np.iinfo("int32").max:
        wrong = found.min() if found.min() < 0 else found.max()
        raise refusal("output", int(wrong), "labels that count from 0, one for each row; leave out rows without one")
    return found.reshape(-1).astype("int32")


def check_labels_fit(labels: np.ndarray, x: Any) -> None:
    """Refuses labels that can't be matched one to one with the rows of `x`."""
    if is_batched(x):
        raise ValueError(
            f"`output` has labels, and `x` is a {type(x).__name__}, whose rows may come in any order. Pass arrays "
            "for both, or make a call per large batch, as in: for x, y in data: input_gradients(model, x, output=y)."
        )
    rows = len(arrays_of(x)[0])
    if len(labels) != rows:
        raise ValueError(f"`output` has {len(labels)} labels, and `x` has {rows} rows. Pass one label per row.")


def _array(value: Any) -> np.ndarray | None:
    try:
        if isinstance(value, type) or not (isinstance(value, (list, tuple)) or hasattr(value, "__array__")):
            return None
        return np.asarray(value)
    except Exception:  # rows of unequal length, a symbolic tensor, or a user's object
        return None
