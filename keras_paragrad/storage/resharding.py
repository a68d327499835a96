"""Changes how a built model is held: from shards to whole variables, or to shards with copies on each replica."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.storage.checkpoint_state import training_variables, with_inner
from keras_paragrad.storage.creation import creating_whole
from keras_paragrad.storage.sharded import ShardedVariable, sharded_value


def hold_whole(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Has each replica hold whole variables, of the model and of its optimizer; every worker calls this."""
    optimizer: Any = model.optimizer
    keys = {}
    for variable, storage in _in_shards(model, "model", "optimizer"):
        before = optimizer._var_key(variable)
        with creating_whole(strategy):
            replace_storage(variable, storage.numpy())
        keys[before] = optimizer._var_key(variable)
    rename_storage(optimizer, keys)


def replace_storage(variable: Any, value: Any) -> None:
    """Keeps a Keras variable's value in a new `tf.Variable`, which tapes watch if they watched the one before."""
    # Keras's flag is that of the moment: a layer that is frozen now may be trained later.
    trainable = variable.trainable
    variable.trainable = variable._value.trainable
    try:
        variable._initialize(value)
    finally:
        variable.trainable = trainable


def rename_storage(optimizer: Any, keys: dict[str, str]) -> None:
    """Tells an optimizer, which knows variables by what they were held in, what they are held in now.

    Args:
        optimizer: The optimizer, or `None`.
        keys: From the keys that it had for them to those that it would give them now.
    """
    for part in with_inner(optimizer):
        for found in vars(part).values():
            if isinstance(found, dict):
                for key in keys.keys() & found.keys():
                    found[keys[key]] = found.pop(key)
            elif isinstance(found, set):
                # Those excluded from weight decay.
                known = keys.keys() & found
                found.difference_update(known)
                found.update(keys[key] for key in known)


def hold_copies(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Has each replica hold a copy of the model's variables, beside its shards; every worker calls this."""
    for _, storage in _in_shards(model, "model"):
        with creating_whole(strategy):
            storage.copies = tf.Variable(storage.numpy(), aggregation=storage.aggregation)
        storage.copies_hold = True


def _in_shards(model: keras.Model, *sections: str) -> Iterator[tuple[Any, ShardedVariable]]:
    found = training_variables(model)
    for variable in [each for section in sections for each in found[section]]:
        storage = sharded_value(variable)
        if storage is not None:
            yield variable, storage
