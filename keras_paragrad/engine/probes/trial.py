"""Trial runs of a model on synthetic rows, without side effects."""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.types import Array, Batch, Structure
from keras_paragrad.engine.probes.tolerances import OF_ALL, OF_WEIGHT

# The sizes to try for axes of unknown size: a short sequence, then an image that can be halved often.
SIZES = (8, 64)
# The most elements of a synthetic tensor, or of a weight whose gradient is compared.
MOST_ELEMENTS = 2**25

_log = logging.getLogger("keras_paragrad")
_thread = threading.local()

Result = TypeVar("Result")


class Inconclusive(Exception):  # noqa: N818  (an answer, not a failure)
    """A trial on synthetic rows can't answer the question."""


def run_trial(run: Callable[..., Result], *choices: Any, otherwise: Result, question: str | None) -> Result:
    """Calls `run` with each of `choices` until one raises no error, and returns its result; `otherwise`, if all raise.

    `run` is called in a separate thread, where no strategy, graph, tape, device or state of Keras is active, so it
    never waits for other replicas or workers. If all raise, logs that `question`, a clause that begins with "whether",
    was not checked.
    """

    def alone(choice: Any) -> Result:
        with without_replicas(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(choice)

    failures = []
    for choice in choices:
        try:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(alone, choice).result()
        except Exception as error:
            # A model that fails on synthetic rows may still train.
            _log.debug("A trial on synthetic rows failed.", exc_info=True)
            failures.append(error)
    if question:
        # TensorFlow's errors are pages long.
        reason = next(iter(str(failures[0]).strip().splitlines()), type(failures[0]).__name__)
        _log.warning("It was not checked %s: a trial on synthetic rows failed with %s", question, reason)
    return otherwise


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


def change_rows(batch: Batch, other: Batch, changed: list[int]) -> tuple[Any, Any]:
    """Makes two batches that differ only in the rows `changed`, where integers are 0 in one batch, 1 in the other."""

    def put(tensor: tf.Tensor, value: Array) -> tf.Tensor:
        chosen = np.isin(np.arange(len(tensor)), changed).reshape([-1, *[1] * (tensor.shape.rank - 1)])
        return tf.where(chosen, tf.cast(value, tensor.dtype), tensor)

    def before(tensor: tf.Tensor | None) -> tf.Tensor | None:
        return tensor if tensor is None or tensor.dtype.is_floating else put(tensor, 0)

    def after(tensor: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor | None:
        return None if tensor is None else put(tensor, value if tensor.dtype.is_floating else 1)

    return keras.tree.map_structure(before, batch), keras.tree.map_structure(after, batch, other)


def take_rows(nested: Structure, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of nested tensors."""
    return keras.tree.map_structure(lambda tensor: None if tensor is None else tensor[start:stop], nested)


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


def check_finite(results: Sequence[Array], what: str) -> None:
    """Refuses to compare numbers if none is finite: any two would match.

    Args:
        results: The tensors to compare; integers are left out.
        what: What they are, in the plural, for the message.

    Raises:
        Inconclusive: There are numbers, and none is finite.
    """
    floats = [tf.cast(tensor, "float64") for tensor in map(tf.convert_to_tensor, results) if tensor.dtype.is_floating]
    if floats and not any(np.isfinite(values).any() for values in floats):
        raise Inconclusive(f"{what} are not finite on synthetic rows")


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


def _norm(tensors: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(each)) for each in tensors)))
