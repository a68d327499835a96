"""The replicas of this process: which they are, and the variables that each has for itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_paragrad.compat.state import state_of


class Place(NamedTuple):
    """Where this process stands among the replicas of a strategy.

    Attributes:
        replicas: How many replicas there are on all workers together.
        local: How many of them are on this worker.
        first: The number of the first of those.
    """

    replicas: int
    local: int
    first: int

    @property
    def workers(self) -> int:
        """How many workers there are; each has as many replicas as this one."""
        return self.replicas // self.local

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self.first // self.local


def place_of(strategy: tf.distribute.Strategy) -> Place:
    """Asks a strategy for the numbers of the replicas on this worker."""
    if strategy.num_replicas_in_sync == 1:
        return Place(1, 1, 0)
    numbers = []

    def note(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        numbers.append(int(context.replica_id_in_sync_group))
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    return Place(strategy.num_replicas_in_sync, len(numbers), min(numbers))


def train_together(model: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Says by which strategy the workers that hold parts of a model talk to each other; `None` if there are none."""
    # Of a model on a mesh of several workers, whose own strategy knows of none.
    state_of(model).workers = strategy


def together_of(model: Any) -> tf.distribute.Strategy:
    """The strategy by which the workers that train a model talk to each other: its own, but on a mesh."""
    return state_of(model).workers or model.distribute_strategy


def replica_variable(shape: Sequence[int | None], dtype: tf.DType = tf.float32) -> tf.Variable:
    """A variable of zeros that each replica has for itself, and that is their sum where all are asked.

    Args:
        shape: Its shape; a size of `None` is 0 at first and may change.
        dtype: Its dtype.
    """
    return tf.Variable(
        tf.zeros([size or 0 for size in shape], dtype),
        shape=tf.TensorShape(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def local_parts(value: Any) -> Sequence[Any]:
    """The parts that this process's replicas have of a variable or tensor; itself, outside of a strategy."""
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
