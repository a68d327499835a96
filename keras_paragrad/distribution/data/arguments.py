"""What `distributed_dataset` can be asked for, checked before any data is touched."""

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.data.policies import check_policy
from keras_paragrad.distribution.data.sources import is_endless


@dataclass(frozen=True)
class Request:
    """The arguments of `distributed_dataset` besides the data.

    Raises:
        ValueError: One of them, or two together, make no sense.
    """

    batch_size: int | None = None
    shuffle: bool | str = False
    class_weight: dict | None = None
    steps_per_epoch: int | None = None
    batch: str = "global"
    shard_policy: str = "auto"
    cache: bool | str | PathLike = False
    prefetch: bool | int = True
    seed: int | None = None

    def __post_init__(self):
        for name in ("batch_size", "steps_per_epoch"):
            _check_count(name, getattr(self, name))
        if self.shuffle not in (True, False, "batch"):
            raise ValueError(f'shuffle is {self.shuffle!r}. Write True, False, or "batch".')
        if self.batch not in ("global", "per_replica"):
            raise ValueError(
                f'batch is {self.batch!r}. Write "global" if a batch is what all replicas share, or "per_replica" if '
                "each of them gets as many rows."
            )
        if not isinstance(self.prefetch, bool):
            _check_count("prefetch", self.prefetch)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed is {self.seed!r}. Write an integer that is not negative, or None.")
        if self.cache and self.shuffle:
            raise ValueError(
                "cache and shuffle are both asked for: a cache would repeat the first epoch's order. Leave one out."
            )
        check_policy(self.shard_policy)

    def check_data(self, x: Any) -> None:
        """Refuses data that does not go together with the other arguments.

        Raises:
            ValueError: It is distributed already, has no end, or has batches of its own and is given a batch size.
        """
        if isinstance(x, tf.distribute.DistributedDataset):
            raise ValueError("The data is distributed already. Give the tf.data.Dataset that it was made from.")
        is_stream = isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__")
        if is_stream and self.batch_size and self.batch == "global":
            raise ValueError(
                f"batch_size={self.batch_size} is given for a {type(x).__name__}, which has batches of its own. Leave "
                "it out: each of its batches is shared by all replicas."
            )
        if is_endless(x) and not self.steps_per_epoch:
            raise ValueError("The data never ends. Write steps_per_epoch=..., here and in fit.")
        if is_endless(x) and self.cache:
            raise ValueError("The data never ends, and so can't be cached. Cache what you repeat: ds.cache().repeat().")

    def cache_file(self, worker: int) -> str:
        """The file a worker caches its pieces in; "" for its memory."""
        return "" if self.cache is True else f"{fspath(self.cache)}-worker{worker}"  # pyright: ignore


def _check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{name} is {value!r}. Write a positive integer.")
