"""Measures within a step how long a worker waits for the others."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.workers import replica_placement

_CPU = "/CPU:0"
# The clock that is attached to a strategy.
_CLOCK = Slot["WaitClock | None"]("wait_clock", None)


class WaitClock:
    """Adds up the time for which a step's tensors wait for other workers.

    It is attached to a strategy, and part of each step that is traced from then on. The first replica of each worker is
    measured.

    Args:
        strategy: The strategy of several workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.replica = replica_placement(strategy).first
        with tf.init_scope(), tf.device(_CPU):
            self._on = tf.Variable(tf.constant(False), trainable=False)
            # The seconds waited since the last `read`, and the time at which the last wait ended.
            self._seconds, self._ended = (tf.Variable(tf.constant(0.0, tf.float64), trainable=False) for _ in range(2))

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "WaitClock | None":
        """The strategy's clock."""
        return _CLOCK.of(strategy)

    @classmethod
    def here(cls) -> "WaitClock | None":
        """The clock of the strategy that a step is traced for; `None` on replicas that it doesn't measure."""
        context = tf.distribute.get_replica_context()
        clock = cls.of(tf.distribute.get_strategy()) if context else None
        is_measured = clock and tf.get_static_value(context.replica_id_in_sync_group) == clock.replica
        return clock if is_measured else None

    @classmethod
    def attach(cls, strategy: tf.distribute.Strategy) -> "WaitClock":
        """Attaches a clock to a strategy."""
        clock = cls(strategy)
        _CLOCK.attach(strategy, clock)
        return clock

    def switch(self, on: bool) -> None:
        """Starts or stops measuring. Measuring waits for a GPU wherever gradients are summed."""
        self._on.assign(on)
        self._seconds.assign(0.0)

    def read(self) -> float:
        """The seconds waited since the last call."""
        seconds = float(self._seconds.numpy())
        self._seconds.assign(0.0)
        return seconds

    def add(self, seconds: float) -> None:
        """Adds a wait outside of the step."""
        if self._on.numpy():
            self._seconds.assign_add(seconds)

    def wait(self, tensors: Sequence[Any], awaited: Sequence[Any]) -> None:
        """Traces operations that add up the time from when `tensors` are computed until `awaited` are."""
        zero = tf.constant(0.0, tf.float64)

        def add() -> tf.Tensor:
            # Overlapping waits count once.
            start = tf.maximum(begun, self._ended)
            now = self._now(awaited)
            with tf.control_dependencies([start]):
                self._ended.assign(now)
            return tf.identity(self._seconds.assign_add(tf.maximum(now - start, 0.0)))

        with tf.device(_CPU):
            begun = tf.cond(self._on, lambda: self._now(tensors), lambda: zero)
            tf.cond(self._on, add, lambda: zero)

    @staticmethod
    def _now(tensors: Sequence[Any]) -> tf.Tensor:
        """The time at which tensors are computed; on a GPU, when a value of each has been copied."""
        values = [
            tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
            for tensor in tensors
            if tensor is not None
        ]
        with tf.device(_CPU):
            copied = [tf.identity(tf.reshape(value, [-1])[:1]) for value in values]
            with tf.control_dependencies(copied):
                return tf.timestamp()
