"""The columns of a pipeline: devices that compute the same stages on other micro-batches."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.record import record_operation_backprop_only, stop_recording

from keras_paragrad.compat.layers import full_precision


class Columns:
    """Says which micro-batch is computed, and keeps what its devices share with other micro-batches of the batch.

    A variable has one home, the first device of its stage. For the stage's other devices its value is copied once a
    batch, and each micro-batch there uses the same copy.

    Attributes:
        micro_batch: The micro-batch that is computed, counted from 0.
    """

    def __init__(self):
        self.micro_batch = 0
        self._copies: dict[tuple[int, str], tuple[Any, tf.Tensor]] | None = None

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Context of one batch, between two updates."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies, self.micro_batch = None, 0

    def copy(self, variable: keras.Variable, device: str) -> tf.Tensor:
        """A variable's value on a device, with the gradient of the variable."""
        with full_precision():
            read = tf.convert_to_tensor(variable.value)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        copies = {} if self._copies is None else self._copies
        found = copies.get((id(variable), device))
        with stop_recording(), tf.device(device):
            if found is None or found[0] is not graph:
                found = copies[id(variable), device] = graph, tf.identity(read)
            # A tensor of its own for each micro-batch.
            own = tf.identity(found[1])
        # `tf.custom_gradient` would take the value along to the device again, to give it back.
        record_operation_backprop_only("Identity", [own], [read], lambda gradient: [gradient])
        return own
