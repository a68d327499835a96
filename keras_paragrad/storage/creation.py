"""Creating variables in shards: each is drawn once, as one device would, and every replica gets its shard."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.collectives import of_first_replica, replica_index
from keras_paragrad.compat.local import place_of
from keras_paragrad.storage.outside import updated_outside
from keras_paragrad.storage.partition import Partition
from keras_paragrad.storage.sharded import ShardedVariable, sharded_value

_CREATE = "_create_variable"


def create_in_shards(strategy: tf.distribute.Strategy, *, copies: bool, min_bytes: float) -> None:
    """Has large trainable variables and their optimizer slots created in shards, wherever the strategy creates them.

    Args:
        strategy: The strategy; nothing but this object is changed.
        copies: Whether each replica keeps a whole copy of the variables, to compute with.
        min_bytes: The size from which a variable is cut.
    """
    own = vars(strategy.extended)
    own[_CREATE] = functools.partial(_create, strategy, copies=copies, min_bytes=min_bytes)
    own["update"] = functools.partial(updated_outside, strategy)


def create_whole(strategy: tf.distribute.Strategy) -> None:
    """Has a strategy create whole variables again; slots of variables in shards stay in shards."""
    if _CREATE in vars(strategy.extended):
        create_in_shards(strategy, copies=False, min_bytes=math.inf)


@contextlib.contextmanager
def creating_whole(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The strategy's scope, in which variables are created whole."""
    before = vars(strategy.extended).pop(_CREATE, None)
    try:
        with strategy.scope():
            yield
    finally:
        if before is not None:
            vars(strategy.extended)[_CREATE] = before


def may_be_in_shards(model: Any) -> bool:
    """Whether a model has variables in shards, or may get them when it is built."""
    create = vars(model.distribute_strategy.extended).get(_CREATE)
    creates = create is not None and create.keywords["min_bytes"] < math.inf
    return creates or any(sharded_value(variable) for variable in model.variables)


def _create(strategy: Any, next_creator: Any, *, copies: bool, min_bytes: float, **kwargs: Any) -> Any:
    create = functools.partial(type(strategy.extended)._create_variable, strategy.extended, next_creator)
    reference = kwargs.get("colocate_with")
    shared = reference.partition if isinstance(reference, ShardedVariable) else None
    trained = reference is None and kwargs.get("trainable") is not False
    if not (shared or trained) or not tf.executing_eagerly():
        return create(**kwargs)
    with tf.device("CPU:0"):
        initial = kwargs.pop("initial_value")
        value: Any = initial() if callable(initial) else initial
        whole = tf.convert_to_tensor(value, kwargs.get("dtype"))
    alike = shared is not None and tuple(whole.shape) == shared.shape
    large = whole.dtype.is_floating and whole.shape.num_elements() * whole.dtype.size >= min_bytes
    if not (alike or (trained and large)):
        return create(initial_value=whole, **kwargs)
    place = place_of(strategy)
    if place.workers > 1:
        whole = _of_the_chief(strategy, whole)
    partition = shared if shared and alike else Partition.of(tuple(whole.shape), place.replicas)
    # Keras 3.16 states the shape, which is that of the whole.
    of_shards = {key: value for key, value in kwargs.items() if key != "shape"}
    made = create(initial_value=functools.partial(tf.zeros, [partition.size], whole.dtype), **of_shards)
    for index, shard in enumerate(made.values):
        shard.assign(partition.kept_shard(whole, place.first + index))
    mirror = create(initial_value=whole, **kwargs) if copies and trained else None
    return ShardedVariable(strategy, made.values, partition, made.aggregation, made._policy, mirror)


def _of_the_chief(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """The value that the first worker has, on all of them."""

    def chosen() -> tf.Tensor:
        mine = value if replica_index() == 0 else tf.zeros_like(value)
        context: Any = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(mine))

    return of_first_replica(strategy, strategy.run(chosen))
