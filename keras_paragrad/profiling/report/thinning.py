"""Thins a long series for plotting, and keeps its extremes."""

import numpy as np

MOST_POINTS = 400


def kept(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Selects which values to draw.

    The values are split into spans of equal length. Of each span the smallest, the largest and the first non-finite
    value are kept, in order, as are the first and the last value overall.

    Args:
        values: All values in order, shape `(values,)`.
        most: Most values to keep, at least 5.

    Returns:
        The indices of the kept values, ascending, shape `(at most most,)`.

    Example:

    >>> import numpy as np
    >>> from keras_paragrad.profiling.report.thinning import kept
    >>> values = np.zeros(1000)
    >>> values[567] = 9.0
    >>> found = kept(values, 20)
    >>> len(found) <= 20, 567 in found
    (True, True)
    """
    if len(values) <= most:
        return np.arange(len(values))
    each = 2 if np.isfinite(values).all() else 3
    spans = np.array_split(np.arange(len(values)), (most - 2) // each)
    inside = [index for span in spans for index in _extremes(values, span)]
    return np.unique([0, *inside, len(values) - 1])


def _extremes(values: np.ndarray, span: np.ndarray) -> list[int]:
    finite = np.isfinite(values[span])
    numbers, strange = span[finite], span[~finite]
    extremes = [numbers[np.argmin(values[numbers])], numbers[np.argmax(values[numbers])]] if len(numbers) else []
    return [*extremes, *strange[:1]]
