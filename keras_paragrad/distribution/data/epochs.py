"""Passes `fit`'s epoch to a dataset, so that a resumed run reads rows in the order of an uninterrupted one."""

from typing import Any

import keras

from keras_paragrad.distribution.data.dataset import DistributedData


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
