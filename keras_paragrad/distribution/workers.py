"""Exchanges numbers and bytes between workers, and checks that they are equal."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import barrier, gather, replica_placement, sum_over_workers

# Bytes are summed in chunks of this size, which take no more memory than a large gradient.
_CHUNK = 1 << 24


def broadcast_bytes(strategy: tf.distribute.Strategy, content: bytes | None, source: int = 0) -> bytes:
    """One worker's bytes on all workers; every worker calls this."""
    length = int(gather(strategy, np.array([len(content or b"")]))[source, 0])
    array = np.zeros(length, np.uint8) if content is None else np.frombuffer(content, np.uint8)
    return sum_bytes(strategy, array).tobytes()


def sum_bytes(strategy: tf.distribute.Strategy, array: np.ndarray) -> np.ndarray:
    """The sum of the workers' bytes, the same on every worker; each byte is nonzero on one worker at most."""
    placement = replica_placement(strategy)
    if placement.workers == 1:
        return array
    sums = []
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK]
        # Collectives don't sum bytes; as each is nonzero on one worker at most, sums of int32 carry nothing over.
        padded = np.pad(chunk, (0, -len(chunk) % 4)).view(np.int32)
        sums.append(sum_over_workers(strategy, placement, padded).view(np.uint8)[: len(chunk)])
    # A worker that went on and exited would end the sum for the others.
    barrier()
    return np.concatenate(sums) if sums else array


def agree(strategy: tf.distribute.Strategy, values: Mapping[str, int], what: str, hint: str = "") -> None:
    """Raises the same error on every worker if their numbers differ.

    Example:

    >>> import tensorflow as tf
    >>> agree(tf.distribute.get_strategy(), {"examples": 1000}, "the training data")
    """
    gathered = gather(strategy, np.array(list(values.values()), np.int64))
    for name, numbers in zip(values, gathered.T, strict=True):
        if (numbers != numbers[0]).any():
            known = ["unknown" if number < 0 else str(number) for number in numbers]
            listed = ", ".join(f"{number} on worker {worker}" for worker, number in enumerate(known))
            raise ValueError(f"The workers have different {what}: {name}: {listed}. Give all workers the same.{hint}")
