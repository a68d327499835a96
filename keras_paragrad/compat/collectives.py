"""Collectives and control flow that work on one device and on every replica of a strategy."""

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.operations import REPLICAS_IN_SYNC, StrategyBase
from keras_paragrad.compat.types import GradientTensor
from keras_paragrad.compat.workers import replica_placement

# Bytes from which a CPU tensor is all-reduced separately, which saves two copies and waiting for a bucket to fill.
# On two cores, 16 tensors of 1 MiB then took 12.5 ms instead of 13.2, 60 of them 47 ms instead of 80, and 16 of 4 MiB
# 38 ms instead of 118; but 16 of 0.5 MiB 7.6 ms instead of 6.6.
LARGE = 2**20
# Bytes up to which tensors on one process's CPUs are summed without a collective: scalars that describe a replica
# batch. On a ring, a CNN's step of 5.6 ms got 0.25 ms shorter.
SMALL = 128


def replica_count(strategy: tf.distribute.Strategy | None = None) -> int:
    """The number of replicas of a strategy, or of the current one; 1 without. Also within `as_one_replica`."""
    return REPLICAS_IN_SYNC.fget(strategy or tf.distribute.get_strategy())


class _Claims(threading.local):
    """How many contexts are open in which this thread's code sees one replica."""

    depth = 0


_claims = _Claims()
_lock = threading.Lock()
_contexts = 0


@contextlib.contextmanager
def as_one_replica() -> Generator[None]:
    """Context in which strategies report one replica to code that reads `num_replicas_in_sync` on this thread.

    A loss that is divided by the number is then the loss of one device: Keras's means (by
    `scale_loss_for_distribution`), `tf.nn.compute_average_loss`, and the user's own divisions. Keras doesn't divide
    sums, so the total can't be corrected afterwards. Collectives still sum over all replicas.
    """
    _count_contexts(1)
    _claims.depth += 1
    try:
        yield
    finally:
        _claims.depth -= 1
        _count_contexts(-1)


@contextlib.contextmanager
def as_on_replica(strategy: tf.distribute.Strategy) -> Generator[None]:
    """Context of a strategy, outside of a step, in which code is traced as on the only replica."""
    # A worker has only its own replicas' values, so the replica is the worker's first.
    first = replica_placement(strategy).first
    with strategy.scope(), tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=first), as_one_replica():
        yield


def _count_contexts(change: int) -> None:
    """Replaces the property of strategies when the first context opens, and restores it when the last one closes."""
    global _contexts
    with _lock:
        _contexts += change
        StrategyBase.num_replicas_in_sync = _CLAIMED if _contexts else REPLICAS_IN_SYNC


_CLAIMED: Any = property(lambda strategy: 1 if _claims.depth else REPLICAS_IN_SYNC.fget(strategy))


def strategy_name(strategy: tf.distribute.Strategy) -> str:
    """A strategy in messages: its class, or "no strategy" for TensorFlow's default."""
    name = type(strategy).__name__
    return "no strategy" if name.startswith("_") else name


def replica_index() -> int:
    """The index of the replica that this code is traced for."""
    context = tf.distribute.get_replica_context()
    index = tf.get_static_value(context.replica_id_in_sync_group) if context else 0
    if index is None:
        raise RuntimeError(
            "All replicas of a TPU run one program, and what computes parts of a batch here needs one for each. Train "
            "on GPUs or CPUs, or on TPUs with Keras alone."
        )
    return int(index)


# Runs a function, with its arguments, on every replica.
OnReplicas: TypeAlias = Callable[..., Any]


def cross_replica(body: Callable[..., None], *values: Any) -> None:
    """Calls `body(per_replica, *values)` once for all replicas; `per_replica(fn, *args)` calls `fn` on each of them.

    `body` returns nothing, and gets the replicas' nested `values` grouped by replica. A decision that all replicas must
    share, such as a branch around a collective, belongs in it.
    """
    if not tf.distribute.has_strategy():
        body(lambda fn, *args: fn(*args), *values)
        return

    def merged(strategy: tf.distribute.Strategy, *grouped: Any) -> None:
        body(lambda fn, *args: strategy.extended.call_for_each_replica(fn, args=args), *grouped)

    tf.distribute.get_replica_context().merge_call(merged, args=values)


def sum_over_replicas(tensors: Sequence[Any]) -> list[Any]:
    """Sums each tensor over the replicas: one collective per dtype, or a faster way on CPUs."""
    if replica_count() == 1:
        return list(tensors)
    # Not every collective supports integers. A float64 holds counts up to 2**53.
    floats: list[Any] = [tf.cast(tensor, "float64") if tensor.dtype.is_integer else tensor for tensor in tensors]
    sums = _all_reduce_sum(floats)
    return [
        tf.cast(total, tensor.dtype) if tensor.dtype.is_integer else total
        for total, tensor in zip(sums, tensors, strict=True)
    ]


def _all_reduce_sum(tensors: Sequence[Any]) -> list[Any]:
    """Sums over replicas: small tensors without a collective, large ones each in its own, the rest in buckets."""
    on_cpus = _sums_on_cpus()
    if on_cpus and replicas_are_local() and sum(map(_bytes_of, tensors)) <= SMALL:

        def add(strategy: tf.distribute.Strategy, grouped: list[tf.distribute.DistributedValues]) -> list[tf.Tensor]:
            return [tf.add_n(strategy.experimental_local_results(values)) for values in grouped]

        return tf.distribute.get_replica_context().merge_call(add, args=(list(tensors),))
    large = [index for index, tensor in enumerate(tensors) if LARGE <= _bytes_of(tensor) < math.inf] if on_cpus else []
    buckets: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if index not in large:
            # The multi-worker collective concatenates a bucket's tensors, so they need one dtype.
            buckets.setdefault(tensor.dtype, []).append(index)
    # Large ones in reverse, the order in which gradients are computed.
    collectives = [*([index] for index in reversed(large)), *buckets.values()]
    context: Any = tf.distribute.get_replica_context()
    sums = {}
    for indices in collectives:
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[index] for index in indices])
        sums.update(zip(indices, summed, strict=True))
    return [sums[index] for index in range(len(tensors))]


def _sums_on_cpus() -> bool:
    """Whether replicas are on CPUs, and the strategy wasn't made with a size of buckets."""
    extended = tf.distribute.get_strategy().extended
    options = getattr(extended, "_communication_options", None)
    kinds = {tf.DeviceSpec.from_string(device).device_type for device in extended.worker_devices}
    return kinds == {"CPU"} and (options is None or not options.bytes_per_pack)


def replicas_are_local() -> bool:
    """Whether all replicas are in this process."""
    return len(tf.distribute.get_strategy().extended.worker_devices) == replica_count()


def _bytes_of(tensor: GradientTensor) -> float:
    """The size of a dense tensor, infinite if it isn't known."""
    if isinstance(tensor, tf.IndexedSlices) or not tensor.shape.is_fully_defined():
        return math.inf
    return tensor.shape.num_elements() * tensor.dtype.size


def first_replica_values(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """Nested values on the first local replica."""
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def run_if(
    predicate: tf.Tensor | bool, action: Callable[[], object], otherwise: Callable[[], object] = lambda: None
) -> None:
    """Runs an action if a predicate holds, in a graph or eagerly; a Python bool is decided while tracing."""
    if isinstance(predicate, bool) or tf.executing_eagerly():
        (action if predicate else otherwise)()
        return

    def branch(run: Callable[[], object], result: bool) -> tf.Tensor:
        run()
        return tf.constant(result)

    tf.cond(predicate, lambda: branch(action, True), lambda: branch(otherwise, False))


def local_values(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """Reads Keras variables on this process's first replica, without a collective."""
    return [np.asarray(tf.convert_to_tensor(first_replica_values(strategy, variable.value))) for variable in variables]
