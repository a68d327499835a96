"""A distributed dataset that changes from epoch to epoch."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.data import trust_equal_steps
from keras_paragrad.compat.local import Place
from keras_paragrad.distribution.data.arguments import Request
from keras_paragrad.distribution.data.batch_sharding import shard_batches
from keras_paragrad.distribution.data.policies import worker_batches
from keras_paragrad.distribution.data.sources import Source
from keras_paragrad.distribution.data.tally import Tally


class WorkerShards:
    """This worker's shards of an epoch's batches; created once if epochs do not differ, so that a cache stays valid."""

    def __init__(self, source: Source, request: Request, policy: str, place: Place, tally: Tally | None = None):
        self._source = source
        self._tally = tally
        self._request = request
        self._policy = policy
        self._place = place
        self._made: tf.data.Dataset | None = None

    def reorder(self, epoch: int) -> None:
        """Draws the order of an epoch, if the dataset stays the same and is read in another order."""
        self._source.reorder(epoch)

    def __call__(self, epoch: int) -> tf.data.Dataset:
        if self._source.changes:
            return self._make(epoch)
        self._made = self._made or self._make(epoch)
        return self._made

    def _make(self, epoch: int) -> tf.data.Dataset:
        batches = self._source.batches(epoch)
        batches = self._tally.recorded(batches) if self._tally else batches
        shards = shard_batches(*worker_batches(batches, self._policy, self._place))
        options = tf.data.Options()
        options.deterministic = True
        shards = shards.with_options(options)
        if self._request.cache:
            shards = shards.cache(self._request.cache_file(self._place.worker))
        if not self._request.prefetch:
            return shards
        ahead = tf.data.AUTOTUNE if self._request.prefetch is True else self._request.prefetch * self._place.local
        return shards.prefetch(ahead)


class Feed(tf.distribute.DistributedDataset):
    """Feeds shards of batches to the replicas of this worker.

    Args:
        strategy: The replicas' strategy.
        shards: The shards of each epoch: one for each local replica, batch after batch.
        local: Number of replicas on this worker.
        changes: Whether epochs differ.
        equal_steps: Whether all replicas are known to have equally many shards.
        tally: Records the batches that are read, if they are to be compared between workers.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        shards: WorkerShards,
        local: int,
        changes: bool,
        equal_steps: bool,
        tally: Tally | None = None,
    ):
        self._strategy = strategy
        self._shards = shards
        self._local = local
        self._changes = changes
        self._equal_steps = equal_steps
        self._tally = tally
        self._built: tuple[tuple[int, int], Any] | None = None
        self.begin(0)

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Makes the next iterator that of an epoch, and those after it that of the next one."""
        self._epoch, self._skip = epoch, skip

    def __iter__(self) -> Iterator[Any]:
        distributed = self._distributed(self._epoch if self._changes else 0, self._skip)
        self._shards.reorder(self._epoch)
        # Keras makes another iterator in the middle of an epoch when the data runs out.
        self.begin(self._epoch + 1)
        if self._tally:
            self._tally.begin()
        return iter(distributed)

    @property
    def element_spec(self) -> Any:
        """What a replica gets, as TensorFlow describes it."""
        return self._distributed(self._epoch if self._changes else 0, 0).element_spec

    def _distributed(self, epoch: int, skip: int) -> Any:
        if self._built is None or self._built[0] != (epoch, skip):
            shards = self._shards(epoch).skip(skip * self._local) if skip else self._shards(epoch)
            distributed = self._strategy.distribute_datasets_from_function(lambda context: shards)
            if self._equal_steps:
                trust_equal_steps(distributed)
            self._built = ((epoch, skip), distributed)
        return self._built[1]
