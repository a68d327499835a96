"""Strategies of several workers, and which replicas and values this process has."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context

from keras_paragrad.compat.state import state_of


class ReplicaPlacement(NamedTuple):
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


def replica_placement(strategy: tf.distribute.Strategy) -> ReplicaPlacement:
    """Asks a strategy for the numbers of the replicas on this worker."""
    if strategy.num_replicas_in_sync == 1:
        return ReplicaPlacement(1, 1, 0)
    numbers = []

    def note(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        numbers.append(int(context.replica_id_in_sync_group))
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    return ReplicaPlacement(strategy.num_replicas_in_sync, len(numbers), min(numbers))


def set_worker_strategy(model: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Says by which strategy the workers that hold parts of a model talk to each other; `None` if there are none."""
    # Of a model on a mesh of several workers, whose own strategy knows of none.
    state_of(model).workers = strategy


def worker_strategy(model: Any) -> tf.distribute.Strategy:
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


def local_replica_values(value: Any) -> Sequence[Any]:
    """The parts that this process's replicas have of a variable or tensor; itself, outside of a strategy."""
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


# Workers leave a collective together, but for the time that the last part takes to arrive.
_PATIENCE_MS = 10_000


def has_joined_a_cluster() -> bool:
    """Whether a strategy for several workers has been made in this process, by whomever."""
    return context().coordination_service is not None


def barrier() -> None:
    """Returns once every worker has called this, or is lost.

    A worker that has received its part of a collective may still be read from. If its process ended then, the others
    would fail, so whatever may be a program's last collective is followed by this. It takes less than 1 ms.
    """
    # An error means that others have ended, or will never come: the next collective says so, if there is one.
    with contextlib.suppress(tf.errors.OpError):
        context().wait_at_barrier("keras_paragrad", _PATIENCE_MS)


class NamedDevicesStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` with replicas on named devices of each worker.

    TensorFlow's own takes all GPUs, or else one CPU device.

    Args:
        devices: Names such as `CPU:0`; every worker needs equally many, of the same kind.
        communication_options: As in TensorFlow's own.
    """

    def __init__(self, devices: Sequence[str], communication_options: Any):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        extended = _NamedDevices(self, resolver, communication_options, devices)
        tf.distribute.Strategy.__init__(self, extended)


class MeshWorkersStrategy(NamedDevicesStrategy):
    """One by which workers talk to each other that hold a mesh together, whose own collectives are numbered from 1."""

    _collective_key_base = 2**20


class _NamedDevices(CollectiveAllReduceExtended):
    def __init__(self, strategy: Any, resolver: Any, communication_options: Any, devices: Sequence[str]):
        self._named = tuple(devices)
        super().__init__(strategy, resolver, communication_options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        kind = self._named[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in self._named), kind
