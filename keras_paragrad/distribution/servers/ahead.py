"""Data for `predict`, of which workers predict on the next batches while one is waited for."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.data import OwnAdapter
from keras_paragrad.distribution.data import DistributedData


class PredictedAhead(OwnAdapter):
    """Batches that have been sent already, in their order.

    Args:
        data: The batches.
        send: Has a worker predict on a batch.
        ahead: How many batches may be on their way.
    """

    def __init__(self, data: DistributedData, send: Callable[[Any], Future], ahead: int):
        self._data = data
        self._feed = _Futures(data, send, ahead)

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._data.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        """The dataset for Keras's trainer, which takes one of this class as it is."""
        return self._feed


class _Futures(tf.distribute.DistributedDataset):
    def __init__(self, data: DistributedData, send: Callable[[Any], Future], ahead: int):
        self._data = data
        self._send = send
        self._ahead = ahead

    def __iter__(self) -> Iterator[Future]:
        sent: deque[Future] = deque()
        for batch in self._data:
            sent.append(self._send(batch))
            if len(sent) == self._ahead:
                yield sent.popleft()
        yield from sent

    @property
    def element_spec(self) -> Any:
        """What a batch looks like, as TensorFlow describes it."""
        return self._data.element_spec
