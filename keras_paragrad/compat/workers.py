"""Strategies of several workers, and the replicas and values that this process holds."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.operations import REPLICAS_IN_SYNC
from keras_paragrad.compat.private import CollectiveAllReduceExtended, context
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import TensorVariable

Result = TypeVar("Result")

# The strategy of the workers that train a model on a mesh.
_WORKERS = Slot[tf.distribute.Strategy | None]("workers", None)


def first_row(rows: tf.Tensor | int, part: tf.Tensor | int, parts: int) -> Any:
    """The index of the first row of a part of a batch; part sizes differ by at most one row, larger parts first."""
    size, larger = divmod(rows, parts) if isinstance(rows, int) else (rows // parts, tf.math.floormod(rows, parts))
    least = min if isinstance(larger, int) and isinstance(part, int) else tf.minimum
    return part * size + least(part, larger)


def parts_per_replica(parts: int, replicas: int) -> int:
    """The number of consecutive parts of a batch per replica: a power of two, as each computes a branch of a tree."""
    count = 1
    while count * replicas < parts:
        count *= 2
    return count


class ReplicaPlacement(NamedTuple):
    """Which of a strategy's replicas are in this process.

    Attributes:
        replicas, local: The number of replicas of all workers, and of this one.
        first: The index of this worker's first replica.
        parts: If set, the batch is cut into this many fixed parts, and replicas get consecutive whole parts; if `None`,
            rows are split evenly.
    """

    replicas: int
    local: int
    first: int
    parts: int | None = None

    def first_row(self, rows: tf.Tensor | int, replica: tf.Tensor | int) -> Any:
        """Index of the first row that `replica` gets; for `replica == replicas`, the number of rows."""
        if self.parts is None:
            return first_row(rows, replica, self.replicas)
        part = replica * parts_per_replica(self.parts, self.replicas)
        part = min(part, self.parts) if isinstance(part, int) else tf.minimum(part, self.parts)
        return first_row(rows, part, self.parts)

    @property
    def workers(self) -> int:
        """Number of workers; all have the same number of replicas."""
        return self.replicas // self.local

    @property
    def worker(self) -> int:
        """Index of this worker."""
        return self.first // self.local


def replica_placement(strategy: tf.distribute.Strategy, parts: int | None = None) -> ReplicaPlacement:
    """Which of a strategy's replicas are in this process; `parts` as in `ReplicaPlacement`."""
    replicas = REPLICAS_IN_SYNC.fget(strategy)
    if replicas == 1:
        return ReplicaPlacement(1, 1, 0, parts)
    indices = []

    # TensorFlow calls this for each replica of this worker.
    def record(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        indices.append(int(context.replica_id_in_sync_group))
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(record)
    return ReplicaPlacement(replicas, len(indices), min(indices), parts)


def set_worker_strategy(model: keras.Model, strategy: tf.distribute.Strategy | None) -> None:
    """Sets the strategy of the workers that train a model, if the model's own strategy has only this one: on a mesh."""
    _WORKERS.attach(model, strategy)


def worker_strategy(model: keras.Model) -> tf.distribute.Strategy:
    """The strategy of the workers that train a model: its own, except on a mesh."""
    return _WORKERS.of(model) or model.distribute_strategy


def replica_variable(shape: Sequence[int | None], dtype: tf.DType = tf.float32) -> tf.Variable:
    """A variable of zeros with a value for each replica, whose sum is read in cross-replica context.

    A size of `None` is 0 at first and may change. TensorFlow keeps int32 in host memory, which XLA can't reach from a
    GPU: use int64.
    """
    return tf.Variable(
        tf.zeros([size or 0 for size in shape], dtype),
        shape=tf.TensorShape(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def local_replica_values(value: TensorVariable | tf.Tensor) -> Sequence[TensorVariable | tf.Tensor]:
    """The values of a variable or tensor on this process's replicas; `None` for an optional without a value."""
    values = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    return [_value_if_any(each) if isinstance(each, tf.experimental.Optional) else each for each in values]


def _value_if_any(optional: Any) -> Any:
    return optional.get_value() if optional.has_value() else None


# Workers leave a collective within one message latency of each other.
_PATIENCE_MS = 10_000


def has_joined_a_cluster() -> bool:
    """Whether this process has created a multi-worker strategy."""
    return context().coordination_service is not None


def barrier() -> None:
    """Waits until every worker has called this function or is lost; takes less than 1 ms.

    Call it after a collective that may be the program's last: other workers may still read from a process that has its
    result already, and would fail if that process exited.
    """
    # On an error other workers are lost; the next collective, if any, reports it.
    with contextlib.suppress(tf.errors.OpError):
        context().wait_at_barrier("keras_paragrad", _PATIENCE_MS)


def gather(strategy: tf.distribute.Strategy, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Gathers every worker's numbers, integers or float64, on all workers by one all-reduce: a row for each worker.

    All workers call it, with the same number of values of one type.
    """
    placement = replica_placement(strategy)
    row = np.asarray(values)
    if placement.workers == 1:
        return row[np.newaxis]
    rows = np.zeros((placement.workers, *row.shape), row.dtype)
    if not row.size:
        # TensorFlow's all-reduce of an empty tensor ends in a segmentation fault.
        return rows
    rows[placement.worker] = row
    gathered = sum_over_workers(strategy, placement, rows)
    barrier()
    return gathered


def sum_over_workers(strategy: tf.distribute.Strategy, placement: ReplicaPlacement, values: np.ndarray) -> np.ndarray:
    """All-reduces the workers' arrays, each contributed by the worker's first replica."""

    def value_of(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        return tf.constant(values if context.replica_id_in_sync_group == placement.first else np.zeros_like(values))

    return strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(value_of), axis=None).numpy()


def all_or_none(strategy: tf.distribute.Strategy, prepare: Callable[[], Result]) -> Result:
    """Calls `prepare` on every worker; if it fails on one, all raise, so that none waits for it."""
    failure, result = None, None
    try:
        result = prepare()
    except Exception as error:
        failure = error
    failed = np.flatnonzero(gather(strategy, np.array([failure is not None], np.int64)))
    if failure is not None:
        raise failure
    if len(failed):
        raise ValueError(f"Worker {failed[0]} has failed here; the error that it raised says why.")
    return result  # pyright: ignore


class NamedDevicesStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` with replicas on named devices of each worker.

    TensorFlow's own strategy takes all GPUs, or one CPU device.

    Args:
        devices: Names such as `CPU:0`; every worker needs the same number, of the same kind.
        communication_options: As in TensorFlow's.
    """

    def __init__(self, devices: Sequence[str], communication_options: tf.distribute.experimental.CommunicationOptions):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        extended = _NamedDevices(self, resolver, communication_options, devices)
        tf.distribute.Strategy.__init__(self, extended)


class MeshWorkersStrategy(NamedDevicesStrategy):
    """A strategy of the workers of a mesh; the mesh's own collectives are numbered from 1."""

    _collective_key_base = 2**20


class _NamedDevices(CollectiveAllReduceExtended):
    """TensorFlow's implementation of the strategy, with other devices of this worker."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        communication_options: tf.distribute.experimental.CommunicationOptions,
        devices: Sequence[str],
    ):
        self._named = tuple(devices)
        super().__init__(strategy, resolver, communication_options)

    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        kind = self._named[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in self._named), kind
