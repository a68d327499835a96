"""Trial runs of a model, without side effects: in a thread of their own, on rows of a batch or made-up ones.

Relative differences up to the tolerances are rounding, not findings.
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

from keras_paragrad.compat.types import Array, Structure


class Tolerance(NamedTuple):
    """A tolerance in single and in half precision."""

    single: float
    half: float

    def of(self, half_precision: bool) -> float:
        """The tolerance of values computed in this precision."""
        return self.half if half_precision else self.single


# Relative to a gradient's norm; faults are off by 1e-4 and more. A difference must also exceed this multiple of the
# noise from another order of the rows, another seed, or other last digits.
GRADIENT, TIMES_NOISE = Tolerance(1e-4, 3e-2), 10
# Relative to a metric's result on the first batch.
METRIC = Tolerance(1e-3, 3e-2)
# Entries of gradients: relative to the weight's largest entry, and to the largest entry of all.
OF_WEIGHT, OF_ALL = 1e-3, Tolerance(1e-5, 3e-2)
# Relative to the losses that layers add.
ADDED = 1e-3
# Relative to the largest output. Products of different batch sizes are rounded differently.
OUTPUT, OUTPUT_OF_PART = Tolerance(1e-5, 0.05), Tolerance(1e-3, 0.05)
# Relative to the largest loss of an element.
LOSS = 1e-5
# Relative to a state, and to its change: a slow state's differences are small, while large numbers round.
STATE, STATE_CHANGE, STATE_ROUNDING = 1e-4, 1e-3, 3e-7
# Smaller values have no relative error.
TINY = 1e-6

# The most elements of a made-up tensor, or of a weight whose gradient is compared.
MOST_ELEMENTS = 2**25

# The most rows on which layers are tried: their activations take little memory.
FEW_ROWS = 8

_log = logging.getLogger("keras_paragrad")
_thread = threading.local()

Result = TypeVar("Result")


class Inconclusive(Exception):  # noqa: N818  (an answer, not a failure)
    """A trial can't answer the question."""


def run_alone(run: Callable[[], Result]) -> Result:
    """Calls a function in a thread where no strategy, graph, tape, device or state of Keras is active.

    So it never waits for other replicas or workers.
    """

    def alone() -> Result:
        with without_replicas(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()


def run_trial(run: Callable[..., Result], *choices: Any, otherwise: Result, question: str | None) -> Result:
    """Calls `run` with each of `choices` until one raises no error, and returns its result; `otherwise`, if all raise.

    If all raise, logs that `question`, a clause that begins with "whether", was not checked.
    """
    failures = []
    for choice in choices:
        try:
            return run_alone(functools.partial(run, choice))
        except Exception as error:
            # A model that fails on made-up rows may still train.
            _log.debug("A trial failed.", exc_info=True)
            failures.append(error)
    if question:
        _log.warning("It was not checked %s: a trial failed with %s", question, first_line(failures[0]))
    return otherwise


def first_line(error: Exception) -> str:
    """The line of an error's message that says what is wrong: TensorFlow's errors are pages long."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    # After the places where an operation was defined, and before its name.
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
    """The first rows of a batch: no more than `most`, and than `FEW_ROWS`."""
    return take_rows(batch, 0, min(row_count(batch), most, FEW_ROWS))


def row_count(batch: Structure) -> int:
    """The number of rows of a batch."""
    return int(next(tensor for tensor in keras.tree.flatten(batch) if tensor is not None).shape[0])


@contextlib.contextmanager
def without_replicas() -> Generator[None]:
    """Context of a trial, or of a trace that never runs: there are no other replicas to wait for."""
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


def relative_error(whole: list[np.ndarray], other: list[np.ndarray]) -> float | None:
    """The norm of the difference over the norm of the whole; `None` if the whole's norm is 0 or not finite."""
    norm = _norm(whole)
    if not np.isfinite(norm) or not norm:
        # Nothing can be learned from it, nor by the model.
        return None
    return _norm([first - second for first, second in zip(whole, other, strict=True)]) / norm


def unexplained_error(
    whole: list[np.ndarray],
    total: list[np.ndarray],
    changed: Callable[[], Iterable[list[np.ndarray]]],
    *,
    half_precision: bool,
) -> float:
    """The relative error of the parts' sum, `total`; 0 if it is within the noise of the `changed` wholes.

    These differ from the whole only by rounding and random numbers, and are computed only if there is an error.
    """
    error = relative_error(whole, total)
    if error is None or error <= GRADIENT.of(half_precision):
        return 0.0
    noise = max((relative_error(whole, other) or 0.0 for other in changed()), default=0.0)
    return 0.0 if error <= TIMES_NOISE * noise else error


def _norm(tensors: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(each)) for each in tensors)))
