"""Code that runs the same on one device and on every replica of a strategy."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def replica_count() -> int:
    """How many replicas train in step; 1 without a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def replica_index() -> int:
    """Which replica this code is being traced for, counted from 0."""
    context = tf.distribute.get_replica_context()
    index = tf.get_static_value(context.replica_id_in_sync_group) if context else 0
    # A TPU traces one program for all its replicas, and there the index has no value yet.
    return 0 if index is None else int(index)


def coordinate(body: Callable[..., None], *per_replica: Any) -> None:
    """Calls `body(run, *per_replica)` once for all replicas, with `run(fn, *args)` calling `fn` on each of them.

    What only one decision may be taken on, such as a branch around a collective, belongs in `body`.

    Args:
        body: What to do; it must not return anything.
        *per_replica: Nested tensors of this replica, handed to `body` grouped by replica.
    """
    if not tf.distribute.has_strategy():
        body(lambda fn, *args: fn(*args), *per_replica)
        return

    def merged(strategy, *grouped):
        body(lambda fn, *args: strategy.extended.call_for_each_replica(fn, args=args), *grouped)

    tf.distribute.get_replica_context().merge_call(merged, args=per_replica)


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over the replicas, all in one collective."""
    if replica_count() == 1:
        return list(tensors)
    return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(tensors)))


def first_replica(value: Any) -> Any:
    """The first local replica's part of a value that is the same on all of them."""
    return of_first_replica(tf.distribute.get_strategy(), value)


def of_first_replica(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """The first local replica's part of nested values."""
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def run_if(predicate: Any, action: Callable[[], None]) -> None:
    """Runs `action` where `predicate` holds, in a graph and eagerly; a Python bool is decided while tracing."""
    if isinstance(predicate, bool) or tf.executing_eagerly():
        if predicate:
            action()
        return

    def taken():
        action()
        return tf.constant(True)

    tf.cond(predicate, taken, lambda: tf.constant(False))
