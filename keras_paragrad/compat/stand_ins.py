"""Variables without memory: of their shape and dtype, to be traced and counted, but never read."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from keras_paragrad.compat.capabilities import nested
from keras_paragrad.compat.saved import SavedVariables

# Smaller variables are made as usual: seeds, counters, rates and statistics are also read outside of steps.
_SMALL = 2**12


def bytes_of(variable: keras.Variable) -> int:
    """The bytes of a variable's value, held once and whole."""
    # `dtype` is what autocasting makes of it.
    dtype = tf.as_dtype(variable._dtype)
    return int(np.prod(tuple(variable.shape), dtype=np.int64)) * dtype.size


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Context in which Keras makes variables of more than a few kilobytes without memory, in every thread.

    They can be traced and assigned, but have no value until they are assigned one. Initializers don't run.
    """
    cls = keras.Variable
    initialize, initialize_with = cls._initialize, cls._initialize_with_initializer

    def from_value(self, value):
        if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
            # A value in a graph that is never run, from what an optimizer does with weights while it is built.
            self._value = stand_in(value.shape, self._dtype, self.trainable, self.name)
        else:
            initialize(self, value)

    def from_initializer(self, initializer):
        if np.prod(self._shape, dtype=np.int64) * tf.as_dtype(self._dtype).size <= _SMALL:
            initialize_with(self, initializer)
        else:
            self._value = stand_in(self._shape, self._dtype, self.trainable, self.name)

    cls._initialize, cls._initialize_with_initializer = from_value, from_initializer
    try:
        yield
    finally:
        cls._initialize, cls._initialize_with_initializer = initialize, initialize_with


def stand_in(shape: Any, dtype: Any, trainable: bool, name: str) -> tf.Variable:
    """A `tf.Variable` without memory."""
    with tf.init_scope():
        return UninitializedVariable(shape=shape, dtype=dtype, trainable=trainable, name=name)


def built_copy(optimizer: Any, variables: Sequence[keras.Variable]) -> Any:
    """A copy of an optimizer, built for variables, its own without memory.

    Args:
        optimizer: The optimizer, built or not; it is left as it is.
        variables: The model's trainable variables.

    Raises:
        ValueError: The optimizer can't be copied.
    """
    made = _copied(optimizer)
    with without_memory(), FuncGraph("never_run").as_default():
        # From the inside: a wrapper builds eagerly, where weights without memory can't be read.
        for each in reversed([*nested(made)]):
            if not each.built:
                each.build(list(variables))
    return made


def state_of(optimizers: Sequence[Any]) -> dict[str, list[keras.Variable]]:
    """The variables of built optimizers, by what they are for: `"slots"`, `"accumulators"` and `"ema"`."""
    each = [part for optimizer in optimizers for part in nested(optimizer)]
    updating = [part for outer in each for part in (outer, *getattr(outer, "optimizers", ()))]
    saved = [part for outer in each for part in vars(outer).values() if isinstance(part, SavedVariables)]
    lists = {
        "ema": [getattr(part, "_model_variables_moving_average", ()) for part in updating],
        "accumulators": [
            *(getattr(part, "_accumulated_gradients", ()) for part in updating),
            *(part.variables.values() for part in saved),
        ],
        # Among them those of the others, which are taken out.
        "slots": [part.variables for part in updating],
    }
    seen: set[int] = set()
    found: dict[str, list[keras.Variable]] = {}
    for kind, variables in lists.items():
        listed = {id(each): each for part in variables for each in part if each is not None and id(each) not in seen}
        seen.update(listed)
        found[kind] = list(listed.values())
    return found


def _copied(optimizer: Any) -> Any:
    try:
        with warnings.catch_warnings():
            # Of what a file could not hold, such as a lambda.
            warnings.simplefilter("ignore")
            config = optimizer.get_config()
        if callable(optimizer._learning_rate) and "learning_rate" in config:
            config["learning_rate"] = optimizer._learning_rate
        return type(optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            f"{optimizer.name} can't be copied to count its variables: {error}. Give {type(optimizer).__name__} a "
            "get_config that its from_config takes."
        ) from error
