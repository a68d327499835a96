"""The arguments of `distributed_dataset`, validated before any data is read."""

from dataclasses import dataclass
from os import PathLike, fspath

import tensorflow as tf

from keras_paragrad.arguments import (
    check_choice,
    check_flag,
    check_instance,
    check_integer,
    check_number,
    check_path,
    quote,
    refusal,
)
from keras_paragrad.compat.data import is_batched
from keras_paragrad.compat.types import FitData
from keras_paragrad.distribution.data.batch_sharding import check_policy
from keras_paragrad.distribution.data.sources import is_endless


@dataclass(frozen=True)
class DataOptions:
    """The arguments of `distributed_dataset` besides the data.

    Raises:
        ValueError: An argument is invalid, or two contradict each other.
    """

    batch_size: int | None = None
    shuffle: bool | str = False
    class_weight: dict[int, float] | None = None
    steps_per_epoch: int | None = None
    batch: str = "global"
    shard_policy: str = "auto"
    cache: bool | str | PathLike[str] = False
    prefetch: bool | int = True
    seed: int | None = None

    def __post_init__(self):
        cached = isinstance(self.cache, (str, PathLike))
        checked = {
            "batch_size": check_integer("batch_size", self.batch_size, example=32, optional=True),
            "shuffle": check_choice("shuffle", self.shuffle, (True, False, "batch")),
            "class_weight": check_class_weight(self.class_weight),
            "steps_per_epoch": check_integer("steps_per_epoch", self.steps_per_epoch, example=100, optional=True),
            "batch": check_choice("batch", self.batch, ("global", "per_replica")),
            "shard_policy": check_policy(self.shard_policy),
            "cache": check_path("cache", self.cache) if cached else check_flag("cache", self.cache),
            "prefetch": check_integer("prefetch", self.prefetch, also=(True, False)),
            "seed": check_integer("seed", self.seed, least=0, optional=True),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.cache and self.shuffle:
            raise ValueError(
                "`cache` and `shuffle` can't be combined: a cache would repeat the first epoch's order. Leave one out."
            )

    def check_data(self, x: FitData) -> None:
        """Refuses data that doesn't fit the other arguments."""
        if isinstance(x, tf.distribute.DistributedDataset):
            raise ValueError("The data is already distributed. Pass the tf.data.Dataset that it was made from.")
        if is_batched(x) and self.batch_size and self.batch == "global":
            raise ValueError(
                f"batch_size={self.batch_size} is given for a {type(x).__name__}, which has to be batched already. "
                f"Leave it out, and write dataset.batch({self.batch_size}) if it isn't. Each of its batches is divided "
                "among the replicas."
            )
        if is_endless(x) and not self.steps_per_epoch:
            raise ValueError("The data is infinite. Write steps_per_epoch=..., here and in fit.")
        if is_endless(x) and self.cache:
            raise ValueError(
                "The data is infinite and can't be cached. Cache it before repeating: ds.cache().repeat()."
            )

    @property
    def shares_rows(self) -> bool:
        """Whether each worker may read only its own rows of a batch, from data with random access."""
        return self.shard_policy == "auto" and self.batch == "global"

    def cache_file(self, worker: int) -> str:
        """The file that a worker caches its shards in; `""` for memory."""
        return "" if self.cache is True else f"{fspath(self.cache)}-worker{worker}"  # pyright: ignore


def check_class_weight(value: object) -> dict[int, float] | None:
    """The argument `class_weight`, from class indices to weights."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise refusal("class_weight", value, "a dict from classes to weights, or None", "{0: 1.0, 1: 2.5}")
    return {
        check_integer("class_weight", label, least=0, example="{0: 1.0, 1: 2.5}"): check_number(
            f"class_weight[{quote(label)}]", weight
        )
        for label, weight in value.items()
    }


def check_strategy(value: object) -> tf.distribute.Strategy:
    """The argument `strategy`; the current strategy for `None`."""
    strategy = check_instance("strategy", value, tf.distribute.Strategy, "a tf.distribute.Strategy", optional=True)
    return tf.distribute.get_strategy() if strategy is None else strategy
