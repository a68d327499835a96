"""`distributed_dataset`: shards the input of `fit` so that the replicas together train as one device would."""

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import (
    check_choice,
    check_instance,
    check_integer,
    check_number,
    quote,
    refusal,
)
from keras_paragrad.compat.data import adapter_of, is_batched, reads_arrays
from keras_paragrad.compat.types import FitData
from keras_paragrad.compat.workers import ReplicaPlacement, all_or_none, replica_placement
from keras_paragrad.distribution.data.agreement import Tally, common_steps
from keras_paragrad.distribution.data.batch_sharding import check_batches
from keras_paragrad.distribution.data.distributed import DistributedData, Feed
from keras_paragrad.distribution.data.sources import (
    ArraySource,
    ReorderedDataset,
    Source,
    StreamSource,
    common_seed,
    is_endless,
)
from keras_paragrad.distribution.options import SHARD_POLICIES


@dataclass(frozen=True)
class DataOptions:
    """The arguments of `distributed_dataset` besides the data."""

    batch_size: int | None = None
    shuffle: bool | str = False
    class_weight: dict[int, float] | None = None
    steps_per_epoch: int | None = None
    shard_policy: str = "data"
    prefetch: bool | int = True
    seed: int | None = None

    def __post_init__(self):
        checked = {
            "batch_size": check_integer("batch_size", self.batch_size, example=32, optional=True),
            "shuffle": check_choice("shuffle", self.shuffle, (True, False, "batch")),
            "class_weight": _check_class_weight(self.class_weight),
            "steps_per_epoch": check_integer("steps_per_epoch", self.steps_per_epoch, example=100, optional=True),
            "shard_policy": check_choice("shard_policy", self.shard_policy, SHARD_POLICIES),
            "prefetch": check_integer("prefetch", self.prefetch, also=(True, False)),
            "seed": check_integer("seed", self.seed, least=0, optional=True),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_data(self, x: FitData) -> None:
        """Refuses data that doesn't fit the other arguments."""
        if isinstance(x, tf.distribute.DistributedDataset):
            raise ValueError("The data is already distributed. Pass the tf.data.Dataset that it was made from.")
        if is_batched(x) and self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is given for a {type(x).__name__}, which has to be batched already. "
                f"Leave it out, and write dataset.batch({self.batch_size}) if it isn't. Each of its batches is divided "
                "among the replicas."
            )
        if is_endless(x) and not self.steps_per_epoch:
            raise ValueError("The data is infinite. Write steps_per_epoch=..., here and in fit.")


def _check_class_weight(value: object) -> dict[int, float] | None:
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


def distributed_dataset(
    strategy: tf.distribute.Strategy,
    x: FitData,
    y: FitData = None,
    sample_weight: FitData = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    steps_per_epoch: int | None = None,
    shard_policy: str = "data",
    prefetch: bool | int = True,
    seed: int | None = None,
    parts: int | None = None,
) -> DistributedData:
    """Splits each batch that one device would train on into a shard for each replica, over all workers in order.

    Shards are contiguous, and their sizes differ by at most one row; if a batch has fewer rows than replicas, the last
    shards are empty. Every worker takes the same number of steps; nothing is dropped or duplicated. With several
    workers, all of them call this, and they check that their data agree before reading it.

    Args:
        strategy: The strategy whose replicas train.
        x: What `fit` takes: arrays, nested or not, a batched `tf.data.Dataset`, a `keras.utils.PyDataset`, a batched
            dataset of Grain or a generator of batches.
        y: Targets, if `x` is arrays.
        sample_weight: Weights of the rows, if `x` is arrays.
        batch_size: Rows in a batch of arrays; 32 by default, unless `steps_per_epoch` is set.
        shuffle: Whether to reshuffle every epoch, the same on every worker: the rows of arrays (with `"batch"`, only
            within each batch) or the batches of a `PyDataset`. The order of other data is unchanged.
        class_weight: As in `fit`.
        steps_per_epoch: As in `fit`; pass it there too.
        shard_policy: How workers share the data. `"data"`: all read the same, and take their rows of each batch.
            `"already_sharded"`: the data of each is its shard.
        prefetch: Whether to prefetch batches, or how many.
        seed: The shuffling seed; the first worker's is used. By default the seed of
            `keras.utils.set_random_seed`, else one that the first worker draws.
        parts: The number of parts of a batch. Each replica gets whole parts; `DistributedFit(deterministic=parts)`
            passes it on.

    Returns:
        The `x` for `fit`, `evaluate` or `predict`.

    Raises:
        ValueError: On every worker: the arguments, or the workers' data, are inconsistent. The message says what to
            write.

    Example:

    >>> import numpy as np, tensorflow as tf
    >>> data = distributed_dataset(tf.distribute.get_strategy(), np.arange(5), batch_size=2)
    >>> data.num_batches
    3
    >>> [batch.numpy().tolist() for batch in data]
    [[0, 1], [2, 3], [4]]
    """
    check_instance("strategy", strategy, tf.distribute.Strategy, "a tf.distribute.Strategy")
    parts = check_integer("parts", parts, optional=True, example=8)
    placement = replica_placement(strategy, parts)

    def check_options() -> DataOptions:
        request = DataOptions(batch_size, shuffle, class_weight, steps_per_epoch, shard_policy, prefetch, seed)
        request.check_data(x)
        if parts and request.shard_policy != "data":
            raise ValueError(
                f'shard_policy="{shard_policy}" has each worker read its own data, so batches depend on the number of '
                "workers, and deterministic training can't. Pass all the data on every worker, and write "
                'shard_policy="data".'
            )
        return request

    request = all_or_none(strategy, check_options)
    shared_seed = common_seed(strategy, request.seed)
    policy, rows = request.shard_policy if placement.workers > 1 else "data", (x, y, sample_weight)
    source = all_or_none(strategy, lambda: _open_source(rows, request, policy, placement, shared_seed))
    steps = common_steps(strategy, source, policy) if placement.workers > 1 else source.steps
    # Workers that read other data than each other may run out of it at different steps.
    equal_steps = placement.workers == 1 or (policy == "data" and steps is not None)
    tally = Tally() if placement.workers > 1 and policy == "data" else None
    feed = Feed(strategy, source, policy, placement, equal_steps, tally, request.prefetch)
    return DistributedData(source, feed, placement, policy, steps, steps_per_epoch is not None)


def undivided_dataset(strategy: tf.distribute.Strategy, x: FitData, *arrays: Any, **options: Any) -> DistributedData:
    """Data for a mesh: every worker reads the whole batches, in the same order."""
    if (policy := options.get("shard_policy", "data")) != "data":
        raise ValueError(
            f"shard_policy={policy!r}, but on a mesh every worker reads all batches. Pass the whole data "
            "on all workers, and leave shard_policy out."
        )
    default, seed = tf.distribute.get_strategy(), common_seed(strategy, options.get("seed"))
    data = all_or_none(strategy, lambda: distributed_dataset(default, x, *arrays, **{**options, "seed": seed}))
    data.check_same_on_workers(strategy)
    return data


def _open_source(
    data: tuple[Any, FitData, FitData], request: DataOptions, policy: str, placement: ReplicaPlacement, seed: int
) -> Source:
    """The source of the batches of `(x, y, sample_weight)`, checked."""
    x, reordered = data[0], None
    if request.shuffle and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
        x = reordered = ReorderedDataset(x, seed)
    adapter = adapter_of(
        x,
        *data[1:],
        batch_size=request.batch_size,
        steps_per_epoch=request.steps_per_epoch,
        class_weight=request.class_weight,
    )
    replicas = placement.local if policy == "already_sharded" else placement.replicas
    if reads_arrays(adapter):
        size = rows = adapter.batch_size
        if policy == "already_sharded":
            rows = size // placement.workers + (placement.worker < size % placement.workers)
        source = ArraySource(adapter, request.shuffle, seed, rows)
    else:
        size, source = None, StreamSource(adapter, reordered)
    check_batches(source.batches(0).element_spec, replicas, size)
    return source
