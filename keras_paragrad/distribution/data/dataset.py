"""`distributed_dataset`: shards the input of `fit` so that the replicas together train as one device would."""

from collections.abc import Iterator
from os import PathLike
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.data import OwnAdapter
from keras_paragrad._keras.replicas.local import Place, place_of
from keras_paragrad.arguments import check_instance
from keras_paragrad.distribution.data.agreement import common_steps
from keras_paragrad.distribution.data.arguments import Request
from keras_paragrad.distribution.data.feed import Feed, Pieces
from keras_paragrad.distribution.data.opening import open_source
from keras_paragrad.distribution.data.order import common_seed
from keras_paragrad.distribution.data.policies import choose_policy
from keras_paragrad.distribution.data.sources import Source
from keras_paragrad.distribution.data.tally import Tally
from keras_paragrad.distribution.workers import all_or_none


class DistributedData(OwnAdapter):
    """What `distributed_dataset` returns: the `x` of `fit`, `evaluate` and `predict`, also as `validation_data`.

    Iterating over it gives the batches of an epoch, one value for each replica on this worker.

    Attributes:
        num_batches: Number of steps per epoch, the same on every worker; `None` if unknown until the data is read.
        batch_size: Number of rows in a global batch, if known.
        batch_spec: The nested `tf.TypeSpec` of a global batch.
        shard_policy: "data", "file" or "already_sharded".
        place: Which replicas are on this worker.
        next_epoch: The number of the epoch to read next.
        tally: Record of the batches' shapes, if several workers read the same data.
    """

    def __init__(
        self,
        source: Source,
        feed: Feed,
        place: Place,
        policy: str,
        steps: int | None,
        endless: bool,
        tally: Tally | None = None,
    ):
        self.tally = tally
        self._source = source
        self._feed = feed
        self._steps = steps
        self._endless = endless
        self.place = place
        self.shard_policy = policy
        self.batch_spec = source.batches(0).element_spec
        self.next_epoch = 0
        self._skip = 0

    @property
    def num_batches(self) -> int | None:
        return self._steps

    @property
    def batch_size(self) -> int | None:
        return self._source.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    @property
    def element_spec(self) -> Any:
        """The nested `tf.TypeSpec` of a step's input: one for each replica on this worker."""
        return self._feed.element_spec

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Sets the epoch to read next; by default, epochs are counted from the first one read.

        Args:
            epoch: Its number, which determines the order of its rows.
            skip: How many of its batches to skip, as they were trained on before an interruption.
        """
        self.next_epoch, self._skip = epoch, skip
        self._feed.begin(epoch, skip)

    def first_batch(self) -> Any:
        """A global batch to build a model with; it is not consumed."""
        return self._source.first_batch()

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        """The dataset for Keras's trainer."""
        return self._feed

    def on_epoch_begin(self) -> None:
        """Begins the next epoch. Keras calls this."""
        if not self._endless:
            self._feed.begin(self.next_epoch, self._skip)
        self._source.begin()
        self.next_epoch, self._skip = self.next_epoch + 1, 0

    def on_epoch_end(self) -> None:
        """Ends an epoch. Keras calls this."""
        self._source.end()

    def __iter__(self) -> Iterator[Any]:
        self.on_epoch_begin()
        try:
            yield from self._feed
        finally:
            self.on_epoch_end()


def distributed_dataset(
    strategy: tf.distribute.Strategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    class_weight: dict[int, float] | None = None,
    steps_per_epoch: int | None = None,
    batch: str = "global",
    shard_policy: str = "auto",
    cache: bool | str | PathLike = False,
    prefetch: bool | int = True,
    seed: int | None = None,
) -> DistributedData:
    """Splits each batch that one device would train on into a shard for each replica, over all workers in order.

    Shards are contiguous, and their sizes differ by at most one row; if a batch has fewer rows than replicas, the last
    shards are empty. Every worker takes the same number of steps; nothing is dropped or duplicated. With several
    workers, all of them call this, and they check that their data agree before reading it.

    Args:
        strategy: The strategy whose replicas train.
        x: What `fit` takes: arrays, nested or not, a batched `tf.data.Dataset`, a `keras.utils.PyDataset` or a
            generator of batches.
        y: Targets, if `x` is arrays.
        sample_weight: Weights of the rows, if `x` is arrays.
        batch_size: Rows in a batch of arrays; 32 if neither it nor `steps_per_epoch` is given.
        shuffle: Whether to reshuffle every epoch, the same on every worker: the rows of arrays (with `"batch"`, only
            within each batch) or the batches of a `PyDataset`. The order of other data is unchanged.
        class_weight: As in `fit`.
        steps_per_epoch: As in `fit`; pass it there too.
        batch: Whether `batch_size`, or a batch of the data, is divided among the replicas (`"global"`), or is what
            each of them gets (`"per_replica"`).
        shard_policy: How workers share the data. `"data"`: all read the same, and take their rows of each batch.
            `"file"`: each reads its own files. `"already_sharded"`: each was given its own shard. `"auto"`: as in the
            options of a `tf.data.Dataset`, else `"data"`.
        cache: Whether to keep this worker's shards in memory after the first epoch, or the name of a file for them.
        prefetch: Whether to prefetch batches, or how many.
        seed: The shuffling seed; the first worker's is used. By default the seed given to
            `keras.utils.set_random_seed`, else one that the first worker draws.

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
    place = place_of(strategy)

    def ask() -> Request:
        request = Request(
            batch_size, shuffle, class_weight, steps_per_epoch, batch, shard_policy, cache, prefetch, seed
        )
        request.check_data(x)
        return request

    request = all_or_none(strategy, ask)
    common = common_seed(strategy, request.seed)

    def open_it() -> tuple[str, Source]:
        policy = choose_policy(request.shard_policy, x, place.workers)
        return policy, open_source((x, y, sample_weight), request, policy, place, common)

    policy, source = all_or_none(strategy, open_it)
    steps = common_steps(strategy, source, policy) if place.workers > 1 else source.steps
    equal_steps = place.workers == 1 or (policy == "data" and steps is not None)
    tally = Tally() if place.workers > 1 and policy == "data" else None
    pieces = Pieces(source, request, policy, place, tally)
    feed = Feed(strategy, pieces, place.local, source.changes, equal_steps, tally)
    return DistributedData(source, feed, place, policy, steps, steps_per_epoch is not None, tally)
