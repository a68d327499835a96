"""What is done to variables outside of steps, in callbacks and loops of one's own: done to the whole."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_paragrad.storage.sharded import sharded_value
from keras_paragrad.storage.sharded_storage import check_being_updated

# The methods of a `tf.Variable` that write a part of it.
WRITES = ("scatter_update", "scatter_max", "scatter_min", "scatter_mul", "scatter_div", "batch_scatter_update")
WRITES += ("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update", "scatter_nd_max", "scatter_nd_min")
WRITES += ("_strided_slice_assign",)
# Of Keras's optimizers, those with which a step is taken.
_OF_A_STEP = ("_apply_weight_decay", "_backend_increment_gradient_accumulators", "_distributed_tf_update_step")


def written_whole(value: tf.Tensor, method: str, /, *arguments: Any, **keywords: Any) -> tf.Tensor:
    """What a variable with some value holds after one of its methods has written to it."""
    whole = _whole_variable(value)
    with tf.device("CPU:0"):
        getattr(whole, method)(*arguments, **keywords)
        return whole.read_value()


def updated_outside(
    strategy: Any, var: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, group: bool = True
) -> Any:
    """`StrategyExtended.update` of a strategy with variables in shards: outside of a step it is given whole ones.

    Raises:
        ValueError: An optimizer takes a step of a loop of one's own.
    """
    given = {id(each): sharded_value(each) for each in tf.nest.flatten([var, args, kwargs or {}])}
    storages = {key: storage for key, storage in given.items() if storage is not None}
    if not storages or any(storage.being_updated for storage in storages.values()):
        return type(strategy.extended).update(strategy.extended, var, fn, args, kwargs, group)
    if not tf.executing_eagerly() or any(name in getattr(fn, "__qualname__", "") for name in _OF_A_STEP):
        check_being_updated(storages.values())
    # A variable may be given twice, and written to wherever it is.
    wholes = {id(storage): _whole_variable(storage.value()) for storage in storages.values()}

    def whole(each: Any) -> Any:
        return wholes[id(storages[id(each)])] if id(each) in storages else each

    with strategy.scope():
        result = fn(whole(var), *tf.nest.map_structure(whole, args), **tf.nest.map_structure(whole, kwargs or {}))
        for storage in {id(each): each for each in storages.values()}.values():
            storage.assign(wholes[id(storage)].read_value())
    return result


def _whole_variable(value: Any) -> Any:
    with tf.device("CPU:0"):
        return tf.Variable(value, trainable=False)
