"""Variables that are saved with their owner, and variables without memory for tracing and counting."""

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import dtype_within
from keras_paragrad.compat.operations import AutoTrackable
from keras_paragrad.compat.optimizer import held_optimizers, nested_optimizers
from keras_paragrad.compat.private import DistributedVariable, FuncGraph, KerasSaveable, UninitializedVariable
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.workers import replica_placement


class SavedVariables(KerasSaveable, AutoTrackable):
    """Named variables that are saved with the object that holds them, in Keras's files and in TensorFlow's.

    Attributes:
        variables: The variables, by their names.
        counterparts: By the `id` of a variable, the model's variable that it belongs to.
    """

    counterparts: dict[int, keras.Variable]
    loads: int

    def __init__(self):
        self.variables: dict[str, keras.Variable] = {}
        # Bypass TensorFlow's tracking.
        self.__dict__.update(counterparts={}, loads=0)

    def _obj_type(self):
        return "Operation"

    def add(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: str = "float32",
        *,
        aggregation: str = "none",
        local: bool = False,
        like: keras.Variable | None = None,
    ):
        """Adds a variable of zeros, a `keras.Variable`, under the name to save it.

        Args:
            aggregation: How replicas' values are combined: `"none"`, `"sum"` or `"mean"`.
            local: Whether each replica has its own value; they are combined on reads in cross-replica context.
            like: The model's variable that it belongs to, whose device it is placed on.
        """
        strategy = tf.distribute.get_strategy()
        colocated = strategy.extended.colocate_vars_with(like.value) if like is not None else contextlib.nullcontext()
        with colocated:
            variable = keras.Variable(
                initializer="zeros",
                shape=shape,
                dtype=dtype,
                trainable=False,
                aggregation=aggregation,
                synchronization="on_read" if local else "auto",
                name=name,
            )
        self.variables[name] = variable
        if like is not None:
            vars(self)["counterparts"][id(variable)] = like
        return variable

    @property
    def restored(self) -> tuple[int, int]:
        """A counter that changes whenever the variables are restored from a file."""
        return self.loads, getattr(self, "_update_uid", 0)

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]):
        """Writes each variable under its name, summed or averaged over the replicas."""
        for name, variable in self.variables.items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Mapping[str, np.ndarray]):
        """Reads the variables from a file; zeros where the file has none."""
        self.__dict__["loads"] += 1
        for name, variable in self.variables.items():
            assign_sum(variable, store[name] if name in store else keras.ops.zeros(variable.shape, variable.dtype))


def assign_sum(variable: keras.Variable, value: Any) -> None:
    """Assigns a value in cross-replica context: a sum over replicas is assigned to the first replica.

    TensorFlow would assign equal shares to all replicas, whose sum may differ in the last bit.
    """
    distributed: Any = variable.value
    on_read = getattr(distributed, "synchronization", None) == tf.VariableSynchronization.ON_READ
    if variable.aggregation != "sum" or not on_read or not isinstance(distributed, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    value = tf.cast(value, distributed.dtype)
    # -0.0 changes no sum, and marks the weight of an open window; +0.0 marks a window that has not begun.
    others = tf.where(tf.equal(value, 0), value, -tf.zeros_like(value)) if value.dtype.is_floating else value * 0
    has_first = replica_placement(distributed.distribute_strategy).first == 0
    for index, local in enumerate(distributed.values):
        local.assign(value if has_first and index == 0 else others)


def number_replicated_variables() -> None:
    """Gives replicated variables `int` and `float`, which TensorFlow's other variables have."""
    for number in (int, float):
        name = f"__{number.__name__}__"
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, lambda variable, number=number: number(variable.read_value()))


# Bytes up to which variables are allocated: seeds, counters, rates and statistics are also read outside of steps.
_SMALL = 2**12


def variable_bytes(variable: keras.Variable) -> int:
    """The bytes of a variable's value, unsharded."""
    dtype = tf.as_dtype(dtype_within(variable, None))
    return int(np.prod(tuple(variable.shape), dtype=np.int64)) * dtype.size


def _initialize(_: bool, initialize: Callable[..., None], variable: keras.Variable, value: object) -> None:
    """Replaces `Variable._initialize`, which is `initialize`, in `without_memory`."""
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        # An optimizer may compute a symbolic value from weights in `build`.
        variable._value = _unallocated(variable, value.shape)
    else:
        initialize(variable, value)


def _initialize_with(_: bool, initialize: Callable[..., None], variable: keras.Variable, initializer: object) -> None:
    """Replaces `Variable._initialize_with_initializer`, which is `initialize`, in `without_memory`."""
    if variable_bytes(variable) <= _SMALL:
        initialize(variable, initializer)
    else:
        variable._value = _unallocated(variable, variable.shape)


_PATCH = ProcessPatch[bool](
    lambda: (
        Replacement(keras.Variable, "_initialize", _initialize),
        Replacement(keras.Variable, "_initialize_with_initializer", _initialize_with),
    )
)


def without_memory() -> contextlib.AbstractContextManager[object]:
    """Context in which Keras creates variables of more than a few kilobytes without memory, on this thread.

    They can be traced and assigned, but have no value before an assignment. Initializers don't run.
    """
    return _PATCH.open(True)


def _unallocated(variable: keras.Variable, shape: Sequence[int | None] | tf.TensorShape) -> tf.Variable:
    """A `tf.Variable` without memory, to hold the value of a Keras variable."""
    dtype = dtype_within(variable, None)
    with tf.init_scope():
        return UninitializedVariable(shape=shape, dtype=dtype, trainable=variable.trainable, name=variable.name)


def copy_built_optimizer(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> keras.optimizers.Optimizer:
    """A copy of an optimizer, built for the model's trainable variables, whose own variables have no memory."""
    try:
        with warnings.catch_warnings():
            # Keras warns of what it can't serialize, such as a lambda.
            warnings.simplefilter("ignore")
            config = optimizer.get_config()
        if callable(optimizer._learning_rate) and "learning_rate" in config:
            config["learning_rate"] = optimizer._learning_rate
        copy = type(optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            f"{optimizer.name} can't be copied to count its variables: {error}. Give {type(optimizer).__name__} a "
            "get_config that its from_config takes."
        ) from error
    with without_memory(), FuncGraph("never_run").as_default():
        # Innermost first: a wrapper would build it eagerly, where weights without memory can't be read.
        for inner in reversed([*nested_optimizers(copy)]):
            if not inner.built:
                inner.build(list(variables))
    return copy


def optimizer_variables(optimizers: Sequence[keras.optimizers.Optimizer]) -> dict[str, list[keras.Variable]]:
    """The variables of built optimizers by purpose, each once: `"slots"`, `"accumulators"` and `"ema"`."""
    updating = [inner for optimizer in optimizers for inner in held_optimizers(optimizer)]
    saved = [value for outer in updating for value in vars(outer).values() if isinstance(value, SavedVariables)]
    lists = {
        "ema": [getattr(inner, "_model_variables_moving_average", ()) for inner in updating],
        "accumulators": [
            *(getattr(inner, "_accumulated_gradients", ()) for inner in updating),
            *(wrapper.variables.values() for wrapper in saved),
        ],
        # These include the averages and accumulators, which come before.
        "slots": [inner.variables for inner in updating],
    }
    return each_once({kind: [each for part in lists[kind] for each in part if each is not None] for kind in lists})


def each_once(groups: Mapping[str, Sequence[keras.Variable]]) -> dict[str, list[keras.Variable]]:
    """Variables by group, each of them once, in its first group."""
    seen: set[int] = set()
    unique: dict[str, list[keras.Variable]] = {}
    for name, variables in groups.items():
        new = {id(variable): variable for variable in variables if id(variable) not in seen}
        unique[name] = list(new.values())
        seen.update(new)
    return unique


@contextlib.contextmanager
def without_values(variables: Sequence[keras.Variable]) -> Generator[None]:
    """Context in which stand-ins replace the values of variables, so that no device is used."""
    before = [(variable, variable._value) for variable in variables]
    try:
        for variable, _ in before:
            variable._value = _unallocated(variable, variable.shape)
        yield
    finally:
        for variable, value in before:
            variable._value = value
