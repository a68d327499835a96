"""The order in which rows are read: drawn from a seed and the epoch, and so the same on every worker."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.data import random_seed
from keras_paragrad.distribution.workers import gather


def order_of(rows: int, batch_size: int, shuffle: bool | str, seed: int, epoch: int) -> np.ndarray:
    """The indices of the rows in the order in which an epoch reads them.

    Args:
        rows: Number of rows.
        batch_size: Number of rows per batch.
        shuffle: `True`, `"batch"` to keep every row in its batch, as in `fit`, or `False`.
        seed: The seed, which is combined with the epoch.
        epoch: The epoch.

    Returns:
        A permutation of `range(rows)`, int64.

    Example:

    >>> order_of(6, 2, False, seed=0, epoch=0)
    array([0, 1, 2, 3, 4, 5])
    >>> sorted(order_of(6, 2, True, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    generator = np.random.default_rng((seed, epoch))
    if shuffle == "batch":
        starts = range(0, rows, batch_size)
        parts = [start + generator.permutation(min(batch_size, rows - start)) for start in starts]
        return np.concatenate(parts).astype(np.int64)
    return generator.permutation(rows).astype(np.int64) if shuffle else np.arange(rows, dtype=np.int64)


def common_seed(strategy: tf.distribute.Strategy, seed: int | None) -> int:
    """The first worker's seed, on all workers: the one given, else Keras's, else one that it draws."""
    if seed is None:
        seed = random_seed()
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    return int(gather(strategy, np.array([seed], np.int64))[0, 0])


class ReorderedDataset(keras.utils.PyDataset):
    """The batches of a `keras.utils.PyDataset`, reshuffled for each epoch.

    Keras itself shuffles with Python's random generator, which differs between workers.

    Args:
        dataset: The dataset, with a known number of batches.
        seed: The shuffling seed.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._seed = seed
        self.reorder(0)

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._order[index]]

    def reorder(self, epoch: int) -> None:
        """Draws the order of an epoch. Call it before the epoch is read."""
        count = self._dataset.num_batches or 0
        self._order = order_of(count, 1, True, self._seed, epoch).tolist()

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
