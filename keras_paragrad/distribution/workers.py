"""Exchanges numbers between workers, and checks that they agree."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import place_of
from keras_paragrad.compat.workers import barrier

Result = TypeVar("Result")

# Bytes are summed in parts of this size, so that they take no more memory than a large gradient.
_CHUNK = 1 << 24


def gather(strategy: tf.distribute.Strategy, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Gathers every worker's numbers on all workers, by one all-reduce.

    Args:
        strategy: The strategy; all its workers call this, with equally many numbers of the same type.
        values: This worker's numbers: integers or float64.

    Returns:
        An array of shape `(workers, len(values))`, the same on every worker.
    """
    place = place_of(strategy)
    own = np.asarray(values)
    if place.workers == 1:
        return own[np.newaxis]
    mine = np.zeros((place.workers, *own.shape), own.dtype)
    if not own.size:
        # TensorFlow's all-reduce of nothing ends in a segmentation fault.
        return mine
    mine[place.worker] = own

    def shown(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        return tf.constant(mine if context.replica_id_in_sync_group == place.first else np.zeros_like(mine))

    found = strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(shown), axis=None).numpy()
    barrier()
    return found


def from_chief(strategy: tf.distribute.Strategy, content: bytes | None) -> bytes:
    """Broadcasts the chief's bytes; every worker calls this.

    Args:
        strategy: The workers' strategy.
        content: The bytes to send, on the chief; `None` on the others.

    Returns:
        The same bytes everywhere.
    """
    place = place_of(strategy)
    if place.workers == 1:
        return content or b""
    length = int(gather(strategy, np.array([len(content or b"")]))[0, 0])
    mine = np.zeros(length, np.uint8) if content is None else np.frombuffer(content, np.uint8)
    return sum_bytes(strategy, mine).tobytes()


def sum_bytes(strategy: tf.distribute.Strategy, mine: np.ndarray) -> np.ndarray:
    """The sum of the workers' bytes, of which no two have the same one nonzero; every worker calls this.

    Args:
        strategy: The workers' strategy.
        mine: This worker's bytes, with zeros for those of others.

    Returns:
        The same bytes everywhere.
    """
    place = place_of(strategy)
    if place.workers == 1:
        return mine
    parts = []
    for start in range(0, len(mine), _CHUNK):
        part = mine[start : start + _CHUNK]
        padded = np.pad(part, (0, -len(part) % 4)).view(np.int32)

        def shown(context: tf.distribute.experimental.ValueContext, padded: np.ndarray = padded) -> tf.Tensor:
            return tf.constant(padded if context.replica_id_in_sync_group == place.first else np.zeros_like(padded))

        total = strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(shown), axis=None).numpy()
        parts.append(total.view(np.uint8)[: len(part)])
    barrier()
    return np.concatenate(parts) if parts else mine


def agree(strategy: tf.distribute.Strategy, values: Mapping[str, int], what: str, hint: str = "") -> None:
    """Raises the same error on every worker if their numbers differ.

    Args:
        strategy: The strategy; all its workers call this.
        values: This worker's numbers by name, with the same names in the same order on every worker. Negative means
            unknown.
        what: What the numbers describe, in the error message.
        hint: Appended to the error message.

    Raises:
        ValueError: A number differs between workers. The message gives every worker's.

    Example:

    >>> import tensorflow as tf
    >>> agree(tf.distribute.get_strategy(), {"examples": 1000}, "the training data")
    """
    found = gather(strategy, np.array(list(values.values()), np.int64))
    for index, name in enumerate(values):
        numbers = found[:, index]
        if (numbers != numbers[0]).any():
            known = ["unknown" if number < 0 else str(number) for number in numbers]
            listed = ", ".join(f"{number} on worker {worker}" for worker, number in enumerate(known))
            raise ValueError(f"The workers have different {what}: {name}: {listed}. Give all workers the same.{hint}")


def all_or_none(strategy: tf.distribute.Strategy, prepare: Callable[[], Result]) -> Result:
    """Calls `prepare` on every worker, and raises on all if it fails on one, so that none waits for the failed one.

    Raises:
        ValueError: `prepare` failed on another worker.
        Exception: Whatever `prepare` raised on this worker.
    """
    failure, result = None, None
    try:
        result = prepare()
    except Exception as error:
        failure = error
    failed = np.flatnonzero(gather(strategy, np.array([failure is not None], np.int64)))
    if failure is not None:
        raise failure
    if len(failed):
        raise ValueError(f"Worker {failed[0]} has failed here; the error that it raised says why.")
    return result  # pyright: ignore
