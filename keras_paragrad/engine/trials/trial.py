"""Trial runs of a model, in threads of their own, on a few rows of a batch.

Rows are synthetic to build a model, or to refuse it before there is a batch. Relative differences up to the tolerances
below are rounding.
"""

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Array, Batch, Structure
from keras_paragrad.compat.workers import local_replica_values


class Tolerance(NamedTuple):
    """A tolerance in single and in half precision."""

    single: float
    half: float

    def of(self, half_precision: bool) -> float:
        """The tolerance of values computed in this precision."""
        return self.half if half_precision else self.single


# Relative to a gradient's norm: faults are off by 1e-4 and more. An error must also exceed this multiple of the noise,
# which another order of the rows, another seed, or other last digits cause.
GRADIENT, TIMES_NOISE = Tolerance(1e-4, 3e-2), 10
# Relative to a metric's result on the first batch.
METRIC = Tolerance(1e-3, 3e-2)
# Entries of gradients: relative to the weight's largest entry, and to the largest entry of all.
OF_WEIGHT, OF_ALL = 1e-3, Tolerance(1e-5, 3e-2)
# Relative to the losses that layers add.
ADDED = 1e-3
# Relative to the largest output. Matrix products round differently for different numbers of rows.
OUTPUT, OUTPUT_OF_PART = Tolerance(1e-5, 0.05), Tolerance(1e-3, 0.05)
# Relative to the largest loss of an element.
LOSS = 1e-5
# Relative to a state, and to its change, as a slowly changing state differs little. Then, the rounding of a state.
STATE, STATE_CHANGE, STATE_ROUNDING = 1e-4, 1e-3, 3e-7
# Smaller differences are rounding.
TINY = 1e-6

# The most elements of a synthetic tensor, or of a weight whose gradient is compared.
MOST_ELEMENTS = 2**25

# The most rows on which layers are tried: their activations take little memory.
FEW_ROWS = 8

_log = logging.getLogger("keras_paragrad")
_thread = threading.local()

Result = TypeVar("Result")


class Inconclusive(Exception):  # noqa: N818  (an answer, not a failure)
    """A trial can't answer the question."""


def run_alone(run: Callable[[], Result]) -> Result:
    """Calls a function in a thread without a strategy, graph, tape, device or state of Keras.

    So the function never waits for other replicas or workers.
    """

    def alone() -> Result:
        with without_replicas(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()


def run_trial(run: Callable[..., Result], *choices: Any, otherwise: Result, question: str | None) -> Result:
    """Returns `run(choice)` for the first of `choices` that raises no error; `otherwise`, if all raise.

    If all raise, logs that `question`, a clause that begins with "whether" or "which", was not checked.
    """
    failures = []
    for choice in choices:
        try:
            return run_alone(functools.partial(run, choice))
        except Exception as error:
            # A model that fails on synthetic rows may still train.
            _log.debug("A trial failed.", exc_info=True)
            failures.append(error)
    if question:
        _log.warning("It was not checked %s: a trial failed with %s", question, first_line(failures[0]))
    return otherwise


def first_line(error: Exception) -> str:
    """The line of an error that says what is wrong. TensorFlow's errors are pages long."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    # In TensorFlow's errors, it is the line before the operation's name.
    named = next((index for index, line in enumerate(lines) if line.startswith("[[{{node")), None)
    return lines[named - 1] if named else next(iter(lines), type(error).__name__)


def take_rows(nested: Structure, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of nested tensors."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.slice(leaf, [start, *[0] * (leaf.shape.rank - 1)], [stop - start, *leaf.shape[1:]])
        return None if leaf is None else leaf[start:stop]

    return keras.tree.map_structure(take, nested)


def few_rows(batch: Structure, most: int = FEW_ROWS) -> Any:
    """The first rows of a batch, at most `most` and at most `FEW_ROWS`."""
    return take_rows(batch, 0, min(row_count(batch), most, FEW_ROWS))


def row_count(batch: Structure) -> int:
    """The number of rows of a batch."""
    return int(next(tensor for tensor in keras.tree.flatten(batch) if tensor is not None).shape[0])


def uneven_parts(count: int) -> list[tuple[int, int]]:
    """Cuts at least 2 rows into two parts, each as (first row, row after the last).

    The first part has an odd number of rows, so that a model that pairs rows fails. From three rows on, sizes differ.
    """
    first = max(3 * count // 8 - 1, 0) | 1
    return [(0, first), (first, count)]


def even_parts(count: int, size: int) -> list[tuple[int, int]]:
    """Cuts `count` rows into parts of `size` rows, the last of which may be smaller."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def join_rows(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches. Batches whose rows have other shapes than the first batch's are left out."""

    def shapes(batch: Batch) -> list[Any]:
        return [None if leaf is None else tuple(leaf.shape[1:]) for leaf in keras.tree.flatten(batch)]

    joined = [batch for batch in batches if shapes(batch) == shapes(batches[0])]
    return keras.tree.map_structure(lambda *leaves: _join(leaves), *joined)


def local_rows(batch: Batch) -> Batch:
    """Joins the rows of this process's replicas, or returns `None` if a tensor has no rows."""
    leaves = [local_replica_values(leaf) for leaf in keras.tree.flatten(batch)]
    if not all(value.shape.rank for values in leaves for value in values if value is not None):
        return None
    return keras.tree.pack_sequence_as(batch, list(map(_join, leaves)))


def gather_rows(nested: Structure, order: Sequence[int]) -> Any:
    """The rows of nested tensors in another order."""

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [take_rows(leaf, row, row + 1) for row in order])
        return None if leaf is None else tf.gather(leaf, order)

    return keras.tree.map_structure(gather, nested)


def _join(leaves: Sequence[Any]) -> Any:
    if leaves[0] is None or len(leaves) == 1:
        return leaves[0]
    return tf.sparse.concat(0, list(leaves)) if isinstance(leaves[0], tf.SparseTensor) else tf.concat(leaves, 0)


@contextlib.contextmanager
def without_replicas() -> Generator[None]:
    """Context of a trial, or of a trace that never runs. Within it, there are no other replicas."""
    before, _thread.is_trial = is_trial(), True
    try:
        yield
    finally:
        _thread.is_trial = before


def is_trial() -> bool:
    """Whether this thread runs a trial, in which there are no other replicas."""
    return getattr(_thread, "is_trial", False)


def gradients_match(first: Sequence[Array], second: Sequence[Array], *, half_precision: bool) -> bool:
    """Whether two gradients, each with a tensor per weight, differ only by rounding."""
    pairs = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(first, second, strict=True)]
    largest = [np.abs(np.concatenate([a.ravel(), b.ravel()])).max(initial=0) for a, b in pairs]
    of_all = max(largest, default=0)
    if half_precision:
        return all(np.allclose(a, b, rtol=0, atol=OF_ALL.half * of_all, equal_nan=True) for a, b in pairs)
    # A gradient that is only rounding error, such as an attention's key bias has, differs from run to run.
    return all(
        np.allclose(a, b, rtol=0, atol=OF_WEIGHT * size + OF_ALL.single * of_all, equal_nan=True)
        for (a, b), size in zip(pairs, largest, strict=True)
    )


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether nested results are the same, within a relative tolerance."""
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(np.allclose(*pair, rtol=tolerance, atol=TINY, equal_nan=True) for pair in pairs)


def sum_with_factors(outputs: Iterable[tf.Tensor], factors: tf.Tensor) -> tf.Tensor:
    """A weighted sum of outputs: a row has its own factor, and a column too."""
    total = tf.zeros([])
    for output in outputs:
        if output.dtype.is_floating and output.shape.rank and output.shape[0] in (None, factors.shape[0]):
            flat = tf.reshape(tf.cast(output, "float32"), [tf.shape(output)[0], -1])
            columns = tf.cos(tf.range(tf.cast(tf.shape(flat)[1], "float32")))
            total += tf.reduce_sum(flat * factors[:, None] * columns)
    return total


def among_others(count: int) -> list[int]:
    """An order of rows in which a middle row replaces the first and the last."""
    return [count // 2, *range(1, count - 1), count // 2]


def with_ends_of(expected: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    """The rows `found`, with the first and last of `expected`."""
    compatible = expected.shape.is_compatible_with(found.shape)
    return tf.concat([expected[:1], found[1:-1], expected[-1:]], 0) if compatible else found


def largest_error(expected: tf.Tensor, found: tf.Tensor, before: Any = None) -> tf.Tensor:
    """The largest difference, relative to the largest expected value, or to its largest change from `before`."""
    if not expected.shape.is_compatible_with(found.shape):
        return tf.constant(float("inf"))
    if not expected.dtype.is_floating:
        return tf.where(tf.reduce_all(tf.equal(expected, found)), 0.0, float("inf"))
    dtype = "float64" if expected.dtype == tf.float64 else "float32"
    one, other = tf.cast(expected, dtype), tf.cast(found, dtype)
    same = tf.logical_or(tf.equal(one, other), tf.logical_and(tf.math.is_nan(one), tf.math.is_nan(other)))
    off = tf.abs(one - other)
    off = tf.where(tf.math.is_finite(off), off, tf.constant(float("inf"), dtype))
    # The maximum of no values is the least number.
    off = tf.maximum(tf.reduce_max(tf.where(same, tf.zeros_like(off), off)), 0)
    scale = _largest(one)
    if before is not None:
        off = tf.maximum(off - STATE_ROUNDING * scale, 0)
        scale = _largest(one - tf.cast(before, dtype))
    return tf.where(off > 0, off / scale, off)


def _largest(values: tf.Tensor) -> tf.Tensor:
    """The largest size of a finite value."""
    return tf.maximum(tf.reduce_max(tf.where(tf.math.is_finite(values), tf.abs(values), tf.zeros_like(values))), 0)


def relative_error(whole: list[np.ndarray], other: list[np.ndarray]) -> float | None:
    """The norm of the difference over the whole's. `None` if the whole's norm is 0 or not finite."""
    norm = _norm(whole)
    if not np.isfinite(norm) or not norm:
        # There is nothing to compare with, and the model doesn't learn from such a gradient.
        return None
    return _norm([first - second for first, second in zip(whole, other, strict=True)]) / norm


def unexplained_error(
    whole: list[np.ndarray],
    total: list[np.ndarray],
    changed: Callable[[], Iterable[list[np.ndarray]]],
    *,
    half_precision: bool,
) -> float:
    """The relative error of the parts' sum `total`, or 0 if it is within the noise.

    `changed` computes the whole with other rounding and random numbers. The noise is the largest error of these.
    """
    error = relative_error(whole, total)
    if error is None or error <= GRADIENT.of(half_precision):
        return 0.0
    noise = max((relative_error(whole, other) or 0.0 for other in changed()), default=0.0)
    return 0.0 if error <= TIMES_NOISE * noise else error


def _norm(tensors: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(each)) for each in tensors)))


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
    """Draws eager tensors with the shapes and dtypes of a batch.

    Real numbers are from `low` to `high`, or 0 and 1 with `labels`, as Keras casts classes to float. Integers are below
    `tokens`: 0 and 1 are valid classes and tokens. Axes of unknown size get `size`. Strings and sparse, ragged or huge
    tensors are refused.
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
