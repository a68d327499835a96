"""`DistributedData`, the `x` of `fit`, and the distributed dataset in it, which changes from epoch to epoch."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.data import CustomAdapter, read_as_validation, trust_equal_steps
from keras_paragrad.compat.types import Batch, Dataset, Logs, Specs
from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.distribution.data.agreement import Tally, common_steps
from keras_paragrad.distribution.data.batch_sharding import shard_batches
from keras_paragrad.distribution.data.sources import Source


class Feed(tf.distribute.DistributedDataset):
    """The shards of batches for the replicas of this worker, epoch after epoch."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        source: Source,
        policy: str,
        placement: ReplicaPlacement,
        equal_steps: bool,
        tally: Tally | None,
        prefetch: bool | int,
    ):
        self._strategy = strategy
        self._source = source
        self._policy = policy
        self._placement = placement
        self._equal_steps = equal_steps
        self.tally = tally
        self._prefetch = prefetch
        self._dataset: Dataset | None = None
        self._cached: tuple[tuple[int, int], Any] | None = None
        self.begin(0)

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Sets the epoch of the next iterator, and how many batches it skips; later iterators take the next epochs."""
        self._epoch, self._skip = epoch, skip

    def __iter__(self) -> Iterator[Batch]:
        distributed = self._distributed(self._epoch, self._skip)
        self._source.reorder(self._epoch)
        # Keras creates a new iterator in the middle of an epoch when the data runs out.
        self.begin(self._epoch + 1)
        if self.tally:
            self.tally.begin()
        return iter(distributed)

    @property
    def element_spec(self) -> Specs:
        """The `tf.TypeSpec` of a step's input."""
        return self._distributed(self._epoch, 0).element_spec

    def _distributed(self, epoch: int, skip: int) -> Dataset:
        """The distributed dataset of an epoch without its first `skip` batches; the dataset made last is kept."""
        key = epoch if self._source.changes else 0, skip
        if self._cached is None or self._cached[0] != key:
            # Where epochs don't differ, their shards are made once.
            if self._dataset is None or self._source.changes:
                self._dataset = self._shards(epoch)
            shards = self._dataset.skip(skip * self._placement.local) if skip else self._dataset
            distributed = self._strategy.distribute_datasets_from_function(lambda context: shards)
            if self._equal_steps:
                trust_equal_steps(distributed)
            self._cached = key, distributed
        return self._cached[1]

    def _shards(self, epoch: int) -> Dataset:
        """One shard for each replica on this worker, batch after batch, prefetched as requested."""
        batches, placement = self._source.batches(epoch), self._placement
        batches = self.tally.recorded(batches) if self.tally else batches
        if self._policy == "already_sharded":
            placement = ReplicaPlacement(replicas=placement.local, local=placement.local, first=0)
        shards = shard_batches(batches, placement)
        options = tf.data.Options()
        options.deterministic = True
        shards = shards.with_options(options)
        if not self._prefetch:
            return shards
        return shards.prefetch(tf.data.AUTOTUNE if self._prefetch is True else self._prefetch * placement.local)


class DistributedData(CustomAdapter):
    """The result of `distributed_dataset`: `x` for `fit`, `evaluate` and `predict`, or `validation_data`.

    Iterating over it gives the batches of an epoch, one value for each replica on this worker.

    Attributes:
        num_batches: Number of steps per epoch, the same on every worker; `None` if unknown until the data is read.
        batch_size: Number of rows in a global batch, if known.
        batch_spec: The nested `tf.TypeSpec` of a global batch.
        shard_policy: "data" or "already_sharded".
        placement: The replicas on this worker.
        next_epoch: The number of the epoch to read next.
        tally: A record of the batches' shapes, if several workers read the same data.
    """

    def __init__(
        self,
        source: Source,
        feed: Feed,
        placement: ReplicaPlacement,
        policy: str,
        steps: int | None,
        iterators_span_epochs: bool,
    ):
        self.tally = feed.tally
        self._source = source
        self._feed = feed
        self._steps = steps
        self._iterators_span_epochs = iterators_span_epochs
        self.placement = placement
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
    def element_spec(self) -> Specs:
        """The nested `tf.TypeSpec` of a step's input: one for each replica on this worker."""
        return self._feed.element_spec

    def count_batch_rows(self) -> int | None:
        """The most rows in a global batch; reads the first one, without consuming it, if nothing else says it."""
        rows, is_sharded = self._source.count_batch_rows(), self.shard_policy == "already_sharded"
        return rows and rows * (self.placement.workers if is_sharded else 1)

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Sets the epoch to read next, without its first `skip` batches; by default, epochs are read from 0 on."""
        self.next_epoch, self._skip = epoch, skip
        self._feed.begin(epoch, skip)

    def for_validation(self, steps: int | None) -> "DistributedData":
        """Sets unread data up to be read in each validation of a `fit` as Keras reads it; returns this."""
        read_as_validation(self._source.adapter, steps)
        return self

    def check_same_on_workers(self, strategy: tf.distribute.Strategy) -> None:
        """Raises an error on every worker if the workers, which all read the whole data, read different data."""
        common_steps(strategy, self._source, "data")

    def first_batch(self) -> Batch:
        """A global batch to build a model with; it is not consumed."""
        return self._source.first_batch()

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        """The dataset for Keras's trainer."""
        return self._feed

    def on_epoch_begin(self) -> None:
        """Begins the next epoch. Keras calls this."""
        # With `steps_per_epoch`, Keras goes on with the iterator of the epoch before.
        if not self._iterators_span_epochs:
            self._feed.begin(self.next_epoch, self._skip)
        self._source.adapter.on_epoch_begin()
        self.next_epoch, self._skip = self.next_epoch + 1, 0

    def on_epoch_end(self) -> None:
        """Ends an epoch. Keras calls this."""
        self._source.adapter.on_epoch_end()

    def __iter__(self) -> Iterator[Batch]:
        self.on_epoch_begin()
        try:
            yield from self._feed
        finally:
            self.on_epoch_end()


class FollowEpochs(keras.callbacks.Callback):
    """Numbers the epochs of a dataset as `fit` numbers them; without it they are counted as they are read.

    Args:
        data: The result of `distributed_dataset`.
    """

    changes_training = False

    def __init__(self, data: DistributedData):
        super().__init__()
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Sets the epoch before any of it is read."""
        if self._data.next_epoch != epoch:
            self._data.set_epoch(epoch)
