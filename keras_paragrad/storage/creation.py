"""Creates variables in shards, and moves a built model's variables into or out of shards."""

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import first_replica_values, replica_index
from keras_paragrad.compat.types import TensorVariable
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.storage.model_variables import following_keys, replace_value, training_variables
from keras_paragrad.storage.sharded import ShardedVariable, check_being_updated, sharded_value
from keras_paragrad.storage.sharding import Partition

_CREATE = "_create_variable"
# The methods of Keras's optimizers that call `StrategyExtended.update` in a step.
_STEP_METHODS = ("_apply_weight_decay", "_backend_increment_gradient_accumulators", "_distributed_tf_update_step")


def create_in_shards(strategy: tf.distribute.Strategy, *, copies: bool, min_bytes: float) -> None:
    """Makes a strategy create trainable variables of `min_bytes` and more, and their optimizer slots, in shards.

    With `copies`, each replica keeps a whole copy of the variables, to compute with.
    """
    attributes = vars(strategy.extended)
    attributes[_CREATE] = functools.partial(_create, strategy, copies=copies, min_bytes=min_bytes)
    attributes["update"] = functools.partial(_update, strategy)


def create_whole(strategy: tf.distribute.Strategy) -> None:
    """Makes a strategy create whole variables again; slots of sharded variables stay sharded."""
    if _CREATE in vars(strategy.extended):
        create_in_shards(strategy, copies=False, min_bytes=math.inf)


@contextlib.contextmanager
def creating_whole(strategy: tf.distribute.Strategy) -> Generator[None]:
    """The strategy's scope, in which variables are created whole."""
    before = vars(strategy.extended).pop(_CREATE, None)
    try:
        with strategy.scope():
            yield
    finally:
        if before is not None:
            vars(strategy.extended)[_CREATE] = before


def may_be_in_shards(model: keras.Model) -> bool:
    """Whether a model has sharded variables, or may get some when it is built."""
    create = vars(model.distribute_strategy.extended).get(_CREATE)
    creates = create is not None and create.keywords["min_bytes"] < math.inf
    return creates or any(sharded_value(variable) for variable in model.variables)


def unshard(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Makes the variables of a model and its optimizer whole on each replica; called on every worker."""
    pairs = list(_sharded_variables(model, "model", "optimizer"))
    with following_keys(model.optimizer, [variable for variable, _ in pairs]):
        for variable, value in pairs:
            with creating_whole(strategy):
                replace_value(variable, value.numpy())


def add_copies(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Gives each replica a whole copy of the model's sharded variables; called on every worker."""
    for _, value in _sharded_variables(model, "model"):
        with creating_whole(strategy):
            whole: Any = value.numpy()
            value.copies = tf.Variable(whole, aggregation=value.aggregation)


def _sharded_variables(model: keras.Model, *sections: str) -> Iterator[tuple[keras.Variable, ShardedVariable]]:
    """The variables that are in shards, with their values, of these sections of `training_variables`."""
    variables = training_variables(model)
    for variable in [variable for section in sections for variable in variables[section]]:
        value = sharded_value(variable)
        if value is not None:
            yield variable, value


def _create(
    strategy: tf.distribute.Strategy,
    next_creator: Callable[..., tf.Variable],
    *,
    copies: bool,
    min_bytes: float,
    **kwargs: Any,
) -> TensorVariable:
    """`StrategyExtended._create_variable`: draws one initial value, and gives each replica its shard of it.

    Creates all variables but large trained ones, and the slots of sharded ones, as usual.
    """
    create = functools.partial(type(strategy.extended)._create_variable, strategy.extended, next_creator)
    # Keras creates a slot next to its variable.
    reference = kwargs.get("colocate_with")
    slot_of = reference.partition if isinstance(reference, ShardedVariable) else None
    trained = reference is None and kwargs.get("trainable") is not False
    if not (slot_of or trained) or not tf.executing_eagerly():
        return create(**kwargs)
    with tf.device("CPU:0"):
        initial = kwargs.pop("initial_value")
        value: Any = initial() if callable(initial) else initial
        whole: Any = tf.convert_to_tensor(value, kwargs.get("dtype"))
    same_shape = slot_of is not None and tuple(whole.shape) == slot_of.shape
    # Optimizers compute with scalars, which a shard isn't.
    numbers = whole.shape.num_elements() if whole.shape.rank and whole.dtype.is_floating else 0
    large = numbers * whole.dtype.size >= min_bytes
    if not (same_shape or (trained and large)):
        return create(initial_value=whole, **kwargs)
    placement = replica_placement(strategy)
    if placement.workers > 1:
        whole = _broadcast_from_chief(strategy, whole)
    partition = slot_of if slot_of and same_shape else Partition.of(tuple(whole.shape), placement.replicas)
    # Keras 3.16 passes the whole variable's shape.
    shard_kwargs = {key: value for key, value in kwargs.items() if key != "shape"}
    shards = create(initial_value=functools.partial(tf.zeros, [partition.size], whole.dtype), **shard_kwargs)
    for index, shard in enumerate(shards.values):
        shard.assign(partition.copy_shard(whole, placement.first + index))
    mirror = create(initial_value=whole, **kwargs) if copies and trained else None
    return ShardedVariable(strategy, shards.values, partition, shards.aggregation, shards._policy, mirror)


def _broadcast_from_chief(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    def broadcast() -> tf.Tensor:
        contribution = value if replica_index() == 0 else tf.zeros_like(value)
        context: Any = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(contribution))

    def run() -> tf.Tensor:
        with strategy.scope():
            return first_replica_values(strategy, strategy.run(broadcast))

    # Keras builds losses in a replica context, where `strategy.run` is not allowed. A new thread has no context.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def _update(
    strategy: tf.distribute.Strategy,
    var: TensorVariable,
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    group: bool = True,
) -> object:
    """`StrategyExtended.update`: outside of a step, as in callbacks, `fn` gets whole variables instead of shards."""
    values = {id(value): sharded_value(value) for value in tf.nest.flatten([var, args, kwargs or {}])}
    sharded = {key: value for key, value in values.items() if value is not None}
    if not sharded or any(value.being_updated for value in sharded.values()):
        return type(strategy.extended).update(strategy.extended, var, fn, args, kwargs, group)
    if not tf.executing_eagerly() or any(name in getattr(fn, "__qualname__", "") for name in _STEP_METHODS):
        check_being_updated(sharded.values())
    # The same variable may be passed twice, and `fn` may write to either.
    unique = {id(value): value for value in sharded.values()}
    tensors = {key: value.value() for key, value in unique.items()}
    with tf.device("CPU:0"):
        wholes = {key: tf.Variable(tensor, trainable=False) for key, tensor in tensors.items()}

    def whole(value: Any) -> Any:
        return wholes[id(sharded[id(value)])] if id(value) in sharded else value

    with strategy.scope():
        result = fn(whole(var), *tf.nest.map_structure(whole, args), **tf.nest.map_structure(whole, kwargs or {}))
        for key, value in unique.items():
            value.assign(wholes[key].read_value())
    return result
