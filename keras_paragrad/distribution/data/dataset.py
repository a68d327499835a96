"""`distributed_dataset`: what `fit` takes, cut up so that the replicas together do what one device would do."""

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
        num_batches: How many steps an epoch takes, on every worker; `None` if only reading tells.
        batch_size: How many rows a global batch has, if that is known.
        batch_spec: What a global batch looks like, as nested `tf.TypeSpec`.
        shard_policy: "data", "file" or "already_sharded".
        place: Which replicas are on this worker.
        next_epoch: The number of the epoch that is read next.
        tally: What the batches looked like, if several workers read the same.
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
        """What a step takes, as nested `tf.TypeSpec`: one for each replica on this worker."""
        return self._feed.element_spec

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Says which epoch is read next; by themselves, epochs are counted from the first one that is read.

        Args:
            epoch: Its number, of which the order of its rows is drawn.
            skip: How many of its batches to leave out, as they were read before training was broken off.
        """
        self.next_epoch, self._skip = epoch, skip
        self._feed.begin(epoch, skip)

    def first_batch(self) -> Any:
        """A global batch to build a model with, which is not taken from those that are read."""
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
    """Cuts each batch that one device would train on into a piece for each replica, of all workers in their order.

    Pieces are contiguous, and their sizes differ by one row at most; of a batch with fewer rows than replicas, the last
    pieces have none. Every worker takes the same number of steps; nothing is dropped or doubled. On several workers,
    all of them call this, and before anything is read they compare what they are about to read.

    Args:
        strategy: Whose replicas train.
        x: What `fit` takes: arrays, nested or not, a batched `tf.data.Dataset`, a `keras.utils.PyDataset` or a
            generator of batches.
        y: Targets, if `x` is arrays.
        sample_weight: Weights of the rows, if `x` is arrays.
        batch_size: Rows in a batch of arrays; 32 if neither it nor `steps_per_epoch` is given.
        shuffle: Whether to draw a new order in every epoch, the same on every worker: of the rows of arrays (with
            `"batch"`, only within each batch) or of the batches of a `PyDataset`. Other data comes as it comes.
        class_weight: As in `fit`.
        steps_per_epoch: As in `fit`, which needs to be given it too.
        batch: Whether `batch_size`, or a batch of the data, is what all replicas share (`"global"`), or what each of
            them gets (`"per_replica"`).
        shard_policy: How workers share the data. `"data"`: all read the same, and take their rows of each batch.
            `"file"`: each reads files of its own. `"already_sharded"`: each was given a part of its own. `"auto"`: what
            the options of a `tf.data.Dataset` say, else `"data"`.
        cache: Whether to keep this worker's pieces in memory after the first epoch, or the name of a file for them.
        prefetch: Whether to prepare batches ahead, or how many.
        seed: What orders are drawn from: the first worker's counts. By default the one that
            `keras.utils.set_random_seed` was given, else one that the first worker draws.

    Returns:
        What to give to `fit`, `evaluate` or `predict` as `x`.

    Raises:
        ValueError: On every worker: the arguments, or the data of the workers, do not go together. The message says
            what to write.

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
