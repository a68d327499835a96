"""Private modules and classes of Keras and TensorFlow, found through their public functions and attributes."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

# Operations of graphs whose outputs are the buffers of their inputs.
SAME_BUFFER = frozenset(
    {"CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Snapshot"}
    | {"Squeeze", "StopGradient"}
)


def source_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of the same graph whose buffer a tensor is."""
    while tensor.op.type in SAME_BUFFER:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def home_of(function: Callable[..., Any]) -> ModuleType:
    """The module that defines a function, whatever it is decorated with."""
    return sys.modules[inspect.unwrap(function).__module__]


def owner_of(name: str, kind: type) -> Any:
    """The base of a class that defines one of its attributes."""
    return next(base for base in kind.__mro__ if name in vars(base))


# The modules that TensorFlow's own functions, and gradients of operations, call operations in.
array_ops = home_of(tf.space_to_batch)
gen_array_ops = home_of(tf.raw_ops.StridedSlice)
gen_random_ops = home_of(tf.raw_ops.RandomUniform)
random_seed = home_of(tf.random.set_seed)
gen_stateless_random_ops_v2 = home_of(tf.raw_ops.StatelessRandomNormalV2)
# The class through which `tf.Module` tracks its variables.
AutoTrackable = owner_of("__setattr__", tf.Module)
# The classes whose methods all strategies, optimizers and variables inherit.
StrategyBase = owner_of("num_replicas_in_sync", tf.distribute.Strategy)
# TensorFlow's property, which `as_one_replica` replaces.
REPLICAS_IN_SYNC: Any = StrategyBase.num_replicas_in_sync
BaseOptimizer = owner_of("apply", keras.optimizers.Optimizer)
Variable = owner_of("assign", keras.Variable)
