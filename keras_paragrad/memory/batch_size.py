"""`find_batch_size`: the largest batch that fits a device, first estimated and then found by training some steps."""

import bisect
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_instance, check_integer, quote
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.data import is_grain
from keras_paragrad.compat.model import overrides_fit
from keras_paragrad.compat.types import FitData, Specs, Structure
from keras_paragrad.memory.available import STEP_SHARE, memory_of_device
from keras_paragrad.memory.breakdown import breakdowns_of
from keras_paragrad.memory.traced_step import traced_steps
from keras_paragrad.memory.trial import CannotTryError, Trials, warn_untried
from keras_paragrad.plain_text import bytes_in_words, counted

_log = logging.getLogger("keras_paragrad")
# Rows of the data that are repeated to make trial batches.
_ROWS = 64
# Rows of the first trial without an estimate: the default of Keras's `fit`.
_FIRST = 32
_UNBOUNDED = 2**20
# Returns the bytes that a number of rows takes; `None` if memory ran out.
Measure = Callable[[int], int | None]


def find_batch_size(
    model: keras.Model,
    x: FitData,
    y: FitData = None,
    *,
    device_bytes: int | None = None,
    max_batch_size: int | None = None,
    steps: int = 2,
    verbose: bool | int = 1,
) -> int:
    """Finds the largest batch that a device takes, within an eighth: by the estimate, then by training some steps.

    Each trial is a separate process, in which the model is made again from its config and trained on rows of the
    data; one that takes too much is killed. The model is unchanged, and so is the data.

    Args:
        model: A compiled and built model, on one device. `microbatch` and `recompute` are in effect in the trials.
        x: As in `fit`: arrays, or a `tf.data.Dataset` or `keras.utils.PyDataset`, whose first batch is read.
        y: Targets, if `x` is arrays.
        device_bytes: What training may take, in bytes: weights, gradients, optimizer state, activations and the graph.
            By default, 80% of the memory that the machine and the process's control group have left, or 90% of what
            the GPU has.
        max_batch_size: The largest to try, for which rows are repeated; by default all rows of `x`, or 1,048,576 of a
            dataset.
        steps: Number of steps of a trial. 0 trains nothing, and goes by the estimate alone, in 80% of `device_bytes`.
        verbose: 1 prints what is tried; it is logged at INFO in any case.

    Returns:
        A number of at most four significant binary digits, such as 112 or 4096, or `max_batch_size`. Where a model
        can't be made again in another process, it goes by the estimate alone, and a warning is logged that says why.

    Raises:
        ValueError: A single row doesn't fit, or nothing can be tried: on several replicas, or on a GPU whose memory
            this process has reserved. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import find_batch_size
    >>> model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> x, y = np.ones((5000, 256), "float32"), np.ones((5000, 1), "float32")
    >>> find_batch_size(model, x, y, device_bytes=100 * 2**20, steps=0, verbose=0)
    640
    """
    check_internals("models", "steps", "segments", "memory")
    check_instance("model", model, keras.Model, "a compiled keras.Model")
    device_bytes = check_integer("device_bytes", device_bytes, example=16 * 2**30, optional=True)
    most = check_integer("max_batch_size", max_batch_size, most=2**31 - 1, example=1024, optional=True)
    steps = check_integer("steps", steps, least=0, most=1000, example=2)
    verbose = check_integer("verbose", verbose, least=0, most=1, also=(True, False), example=1)
    _check_can_find(model)
    device_bytes = memory_of_device(device_bytes, steps)
    data, total = _first_rows(x, y)
    sizes = nice_sizes(most or total or _UNBOUNDED)
    log, spec = TrialLog("find_batch_size", verbose), _spec_of(model, data)

    def measuring(measure: Measure, limit: int, how: str = "") -> Measure:
        def bytes_of(size: int) -> int | None:
            used = measure(size)
            takes = f"take{'s' if size == 1 else ''} {'more than' if used is None else f'{bytes_in_words(used)} of'}"
            ending = ", too much." if used is None or used > limit else "."
            log(f"{counted(size, 'row')} {takes} {bytes_in_words(limit)}{how}{ending}")
            return used

        return bytes_of

    @functools.cache
    def estimate(size: int) -> int:
        return breakdowns_of(model, traced_steps(model, [size], spec)[0], replicas=1)[0].total

    # Where to begin without an estimate.
    first, per_row = bisect.bisect_right(sizes, max(_FIRST, sizes[0])) - 1, None
    no_estimate = cannot_try = None
    try:
        first, per_row = _guess(sizes, device_bytes, estimate, first)
    except ValueError as error:
        no_estimate = error
    found = None
    try:
        if steps:
            trials = Trials(model, data, device_bytes, steps)
            found = largest(sizes, device_bytes, measuring(trials.bytes_of, device_bytes), first, per_row)
    except CannotTryError as error:
        cannot_try = error
        warn_untried(log.asked_by, model.name, error)
    if cannot_try or not steps:
        if no_estimate:
            untried = f" It can't be tried either: {str(cannot_try).rstrip('.')}." if cannot_try else ""
            raise ValueError(f"find_batch_size can't estimate what {model.name!r} takes. {no_estimate}{untried}")
        limit = int(STEP_SHARE * device_bytes)
        found = largest(sizes, limit, measuring(estimate, limit, " by the estimate"), first, per_row)
    if found is None:
        raise ValueError(
            f"Not even {counted(sizes[0], 'row')} of {model.name!r} can be trained in {bytes_in_words(device_bytes)}. "
            "Write recompute(model), or train it in shards: DistributedFit(shard='parameters')."
        )
    return found


def _check_can_find(model: keras.Model) -> None:
    """Refuses a model that can be neither tried nor estimated."""
    if not model.compiled or not model.built:
        missing = "built. Call model.build(shape), or the model on a batch,"
        missing = missing if model.compiled else "compiled. Call model.compile(optimizer, loss)"
        raise ValueError(f"find_batch_size trains {model.name!r}, which is not {missing} first.")
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"find_batch_size tries one device, and {model.name!r} is built for {replicas} replicas. Multiply what it "
            "finds by the number of replicas: build and compile the model without `with dist.scope():` for it. "
            "dist.estimate(model, batch_size) is for several."
        )


def _first_rows(x: Any, y: Any) -> tuple[list[Structure], int | None]:
    """The first rows of `x`, `y` and `sample_weight`, as nested arrays, and the number of all rows, if it is known.

    Raises:
        ValueError: The data is a generator, or its elements aren't dense arrays with a batch dimension.
    """
    sample_weight, is_whole = None, False
    if isinstance(x, tf.data.Dataset) or is_grain(x):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iter(x)))
    elif isinstance(x, keras.utils.PyDataset):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(x[0])
    elif hasattr(x, "__next__"):
        raise ValueError("`x` is a generator, and the trial would consume its rows. Pass arrays, such as one batch's.")
    else:
        x, is_whole = np.asarray(x) if isinstance(x, list) and x and isinstance(x[0], str) else x, True

    def rows_of(leaf: Any) -> np.ndarray | None:
        rows = None if leaf is None else np.asarray(leaf[:_ROWS])
        if rows is not None and rows.dtype == object and not all(isinstance(each, (str, bytes)) for each in rows.flat):
            raise TypeError(f"found {quote(leaf)}")
        return rows

    try:
        total = len(keras.tree.flatten(x)[0]) if is_whole else None
        return [keras.tree.map_structure(rows_of, part) for part in (x, y, sample_weight)], total
    except (TypeError, ValueError) as error:
        raise ValueError(f"`x` and `y` have to be arrays, or a dataset of dense batches: {error}") from error


def _spec_of(model: keras.Model, data: Sequence[Structure]) -> Specs:
    """The specs of batches `(x, y)` or `(x, y, sample_weight)` with any number of rows, from arrays of some rows.

    `None` if arrays don't tell what the step gets: the model overrides `fit`, or an array holds no numbers.
    """

    def spec(leaf: np.ndarray) -> tf.TensorSpec:
        # Keras casts the data like this.
        dtype = keras.config.floatx() if leaf.dtype.kind == "f" else leaf.dtype
        return tf.TensorSpec((None, *leaf.shape[1:]), dtype)

    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if overrides_fit(model) or any(leaf.dtype.kind not in "biuf" for leaf in leaves):
        return None
    x, y, sample_weight = (None if part is None else keras.tree.map_structure(spec, part) for part in data)
    return (x, y) if sample_weight is None else (x, y, sample_weight)


class TrialLog:
    """Logs a line for each size that is tried, and prints it if `verbose`."""

    def __init__(self, asked_by: str, verbose: int):
        self.asked_by, self._verbose = asked_by, verbose

    def __call__(self, line: str) -> None:
        if self._verbose:
            print(f"{self.asked_by}: {line}", flush=True)
        _log.info("%s: %s", self.asked_by, line)


def _guess(sizes: Sequence[int], limit: int, estimate: Callable[[int], int], first: int) -> tuple[int, float]:
    """The index of the largest size that fits by the estimate, and the estimated bytes of a row there.

    Raises:
        ValueError: The step can't be traced.
    """
    points = [(0, 0)]

    def measure(size: int) -> int:
        points.append((size, estimate(size)))
        return points[-1][1]

    found = largest(sizes, limit, measure, first, None)
    (other, used_there), (size, used) = points[-2:]
    return bisect.bisect_left(sizes, found) if found else 0, max(1.0, (used - used_there) / (size - other))


def nice_sizes(most: int) -> list[int]:
    """Sizes of the form `k * 2**n` with `k < 16`, up to `most`, which is the last."""
    powers = range(most.bit_length())
    return sorted({size for power in powers for digits in range(1, 16) if (size := digits << power) < most} | {most})


def largest(sizes: Sequence[int], limit: int, measure: Measure, first: int, per_row: float | None) -> int | None:
    """Returns the largest size whose cost is at most `limit`, if the cost grows with the size.

    Extrapolates from the sizes measured so far to the limit. Ends when a size fits and the next one doesn't fit, or
    isn't expected to.

    Args:
        sizes: The sizes, in ascending order.
        limit: The limit, in bytes.
        measure: Returns the bytes that a size takes, or `None` if the memory ran out.
        first: The index of the size to begin with.
        per_row: The expected bytes of a row; `None` if unknown.
    """
    # The index of the largest size that fits, and of the smallest that doesn't, so far.
    low, high, index = -1, len(sizes), first
    points: list[tuple[int, int]] = []
    while True:
        used = measure(sizes[index])
        points += [] if used is None else [(sizes[index], used)]
        fits = used is not None and used <= limit
        low, high = (index, high) if fits else (low, index)
        if high - low <= 1:
            break
        if used is None:
            # Half of the smallest size that was too large, or between it and the largest size that fits.
            half = bisect.bisect_right(sizes, sizes[index] // 2) - 1
            index = (low + high) // 2 if low >= 0 else half
        else:
            # The rows that are expected to take `limit`: by the last two points, or by one and the bytes of a row.
            rows, slope = sizes[index], per_row or used / sizes[index]
            if len(points) > 1:
                slope = (used - points[-2][1]) / (rows - points[-2][0])
            rows = rows + (limit - used) / slope if slope > 0 else float("inf")
            index = bisect.bisect_right(sizes, rows) - 1
            # The next size isn't expected to fit.
            if index <= low and len(points) > 1:
                break
        index = min(max(index, low + 1), high - 1)
    return sizes[low] if low >= 0 else None
