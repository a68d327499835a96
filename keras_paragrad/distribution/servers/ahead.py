"""Data for `predict`: workers predict on later batches while the result of one is awaited."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.data import OwnAdapter
from keras_paragrad.distribution.data import DistributedData


class PredictedAhead(OwnAdapter):
    """The futures of batches sent ahead, in order.

    Args:
        data: The batches.
        send: Sends a batch to a worker for prediction.
        ahead: How many batches may be in flight.
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

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        """The dataset for Keras's trainer, which uses a `DistributedDataset` as is."""
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
        """The type spec of a batch."""
        return self._data.element_spec
