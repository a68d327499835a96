"""Measures within a step how long a worker waits for the others."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.state import state_of
from keras_paragrad.compat.workers import replica_placement

_CPU = "/CPU:0"


class WaitClock:
    """Adds up the time from when a sum over replicas has all its inputs on this worker until it is there.

    It is attached to a strategy, and part of each step that is traced from then on. The first replica of each worker is
    measured.

    Args:
        strategy: The strategy of several workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.replica = replica_placement(strategy).first
        with tf.init_scope(), tf.device(_CPU):
            self._on = tf.Variable(tf.constant(False), trainable=False)
            self._seconds = tf.Variable(tf.constant(0.0, tf.float64), trainable=False)

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy) -> "WaitClock | None":
        """The strategy's clock."""
        return state_of(strategy).wait_clock

    @classmethod
    def attach(cls, strategy: tf.distribute.Strategy) -> "WaitClock":
        """Gives a strategy a clock."""
        clock = state_of(strategy).wait_clock = cls(strategy)
        return clock

    def switch(self, on: bool) -> None:
        """Measures from now on, or no longer. Measuring waits for a GPU wherever gradients are summed."""
        self._on.assign(on)
        self._seconds.assign(0.0)

    def read(self) -> float:
        """The seconds waited since the last call."""
        seconds = float(self._seconds.numpy())
        self._seconds.assign(0.0)
        return seconds

    def begin(self, inputs: Sequence[Any]) -> tf.Tensor:
        """When the inputs of a sum are there, while a step is traced."""
        with tf.device(_CPU):
            return tf.cond(self._on, lambda: self._now(inputs), lambda: tf.constant(0.0, tf.float64))

    def end(self, begun: tf.Tensor, sums: Sequence[Any]) -> None:
        """Adds the time since then until the sums are there."""

        def add() -> tf.Tensor:
            self._seconds.assign_add(self._now(sums) - begun)
            return tf.constant(0.0, tf.float64)

        with tf.device(_CPU):
            tf.cond(self._on, add, lambda: tf.constant(0.0, tf.float64))

    @staticmethod
    def _now(tensors: Sequence[Any]) -> tf.Tensor:
        """The time at which tensors are computed: on a GPU not before a value of each has been copied."""
        values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
        with tf.device(_CPU):
            copied = [tf.identity(tf.reshape(each, [-1])[:1]) for each in values]
            with tf.control_dependencies(copied):
                return tf.timestamp()
