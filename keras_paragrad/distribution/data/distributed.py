"""`DistributedData`: sharded batches as the data of `fit`, and the callback that tells it `fit`'s epochs."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.data import OwnAdapter, read_as_validation
from keras_paragrad.compat.local import Place
from keras_paragrad.distribution.data.agreement import common_steps
from keras_paragrad.distribution.data.feed import Feed
from keras_paragrad.distribution.data.sources import Source
from keras_paragrad.distribution.data.tally import Tally


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
    def element_spec(self) -> Any:
        """The nested `tf.TypeSpec` of a step's input: one for each replica on this worker."""
        return self._feed.element_spec

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Sets the epoch to read next; by default, epochs are counted from the first one read."""
        self.next_epoch, self._skip = epoch, skip
        self._feed.begin(epoch, skip)

    def for_validation(self, steps: int | None) -> "DistributedData":
        """This, read by each validation of a `fit` as Keras reads it, of which nothing was read yet."""
        read_as_validation(self._source.adapter, steps)
        return self

    def check_alike(self, strategy: tf.distribute.Strategy) -> None:
        """Raises on every worker if their data differ, where each of them reads all of it."""
        common_steps(strategy, self._source, "data")

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


class FollowEpochs(keras.callbacks.Callback):
    """Numbers the epochs of a dataset as `fit` numbers them; without it they are counted as they are read.

    Args:
        data: What `distributed_dataset` returned.
    """

    def __init__(self, data: DistributedData):
        super().__init__()
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the epoch before any of it is read."""
        if self._data.next_epoch != epoch:
            self._data.set_epoch(epoch)
