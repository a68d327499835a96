"""The variables of a model and its optimizer: listed, assigned, and moved to another `tf.Variable`."""

import contextlib
import operator
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.model import all_layers, compile_config, optimizers_of
from keras_paragrad.compat.optimizer import held_optimizers
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Array
from keras_paragrad.compat.variables import SavedVariables, assign_sum, each_once
from keras_paragrad.compat.workers import local_replica_values

# Variables by owner: "model", "optimizer" or "metrics".
Sections = dict[str, list[keras.Variable]]
# The `StepBuilder` of a model, whose variables are saved with the model's.
STEP_BUILDER = Slot[Any]("step_builder", None)


def training_variables(model: keras.Model) -> Sections:
    """All variables that a step reads or writes, by owner, in the same order in every process."""
    builder = STEP_BUILDER.of(model)
    window = builder.loss_window if builder is not None and builder.stages.apply else None
    sections: Sections = {
        "model": model.variables,
        "optimizer": [
            variable for optimizer in held_optimizers(model.optimizer) for variable in variables_of(optimizer)
        ],
        "metrics": [*model.metrics_variables, *(window.variables.values() if window is not None else ())],
    }
    return each_once(sections)


def variables_of_run(model: keras.Model) -> Sections:
    """`training_variables`, plus the variables of all other optimizers of the model."""
    sections = training_variables(model)
    others = [inner for optimizer in optimizers_of(model) for inner in held_optimizers(optimizer)]
    of_others = [variable for optimizer in others for variable in variables_of(optimizer)]
    return each_once({**sections, "optimizer": [*sections["optimizer"], *of_others]})


def built_with(model: keras.Model) -> list[list[int] | None]:
    """For each optimizer of a model, the indices of the variables it was built with; `None` if it isn't built."""
    index_of = {id(variable): index for index, variable in enumerate(model.variables)}
    built: list[list[int] | None] = []
    for optimizer in optimizers_of(model):
        variables = optimizer._trainable_variables if optimizer.built else None
        others = [variable.path for variable in variables or () if id(variable) not in index_of]
        if others:
            raise ValueError(
                f"{optimizer.name} updates {', '.join(others)}, and backups hold the model's variables alone. Make the "
                "layers that have them attributes of the model."
            )
        built.append(None if variables is None else [index_of[id(variable)] for variable in variables])
    return built


def build_as_before(model: keras.Model, built: Sequence[Sequence[int] | None]) -> None:
    """Builds a model's optimizers with the variables whose indices `built_with` has returned, for each optimizer."""
    for optimizer, indices in zip(optimizers_of(model), built, strict=False):
        if indices is not None and not optimizer.built and max(indices, default=0) < len(model.variables):
            with model.distribute_strategy.scope():
                optimizer.build([model.variables[index] for index in indices])


def assign_all(sections: Sections, values: dict[str, Iterable[np.ndarray]]) -> None:
    """Assigns values to the variables; called on all workers, whose number may have changed."""
    for name, variables in sections.items():
        for variable, value in zip(variables, values[name], strict=True):
            assign_sum(variable, value)


def add_all(sections: Sections, values: dict[str, Iterable[np.ndarray]]) -> None:
    """Adds the values of another replica to the variables; called on all workers."""
    for name, variables in sections.items():
        for variable, value in zip(variables, values[name], strict=True):
            assign_sum(variable, variable.numpy() + value)


def build_model_optimizer(model: keras.Model) -> None:
    """Builds a model's optimizer, unless it is built already."""
    if model.optimizer is not None and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def build_optimizer_ahead(model: keras.Model) -> None:
    """Builds the optimizer before the first step, unless layers are frozen: they may be unfrozen by then."""
    if all(layer.trainable for layer in (model, *all_layers(model))):
        build_model_optimizer(model)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch at which the running `fit` and later ones begin; `None` resets it."""
    check_internals("backups")
    model._initial_epoch = epoch


def variables_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """An optimizer's variables, including accumulators and variables that Keras doesn't track (Nadam's product)."""
    known = [
        *optimizer.variables,
        *(variable for saved in _saved_variables(optimizer) for variable in saved.variables.values()),
    ]
    ids = set(map(id, known))
    attributes = (value for value in vars(optimizer).values() if isinstance(value, keras.Variable))
    return [*known, *(attribute for attribute in attributes if id(attribute) not in ids)]


def accumulated_variables(optimizer: keras.optimizers.Optimizer) -> dict[int, keras.Variable]:
    """The model's variable for each accumulator of its gradient, by the accumulator's `id`."""
    saved = [wrapper for part in held_optimizers(optimizer) for wrapper in _saved_variables(part)]
    return {accumulator: variable for wrapper in saved for accumulator, variable in wrapper.counterparts.items()}


class TracedState:
    """The `compile` call, variables, storages and frozen layers with which a model's functions were traced."""

    def __init__(self):
        self._objects: list[Any] = []
        self._flags: list[bool] = []

    def update(self, model: keras.Model) -> bool:
        """Records the model's state; returns whether it has changed."""
        sections = training_variables(model)
        variables = (*sections["model"], *sections["optimizer"])
        values = [variable._value for variable in variables]
        objects, flags = [compile_config(model), *variables, *values], [variable.trainable for variable in variables]
        before = [reference() for reference in self._objects]
        same = len(before) == len(objects) and all(map(operator.is_, before, objects)) and flags == self._flags
        self._objects, self._flags = list(map(weakref.ref, objects)), flags
        return not same


def replace_value(variable: keras.Variable, value: Array) -> None:
    """Moves a Keras variable to a new `tf.Variable` with a value; tapes watch it if they watched the old one."""
    # Keras's flag may change: a layer that is frozen now may be trained later.
    trainable = variable.trainable
    variable.trainable = variable._value.trainable
    try:
        variable._initialize(value)
    finally:
        variable.trainable = trainable


@contextlib.contextmanager
def held_by_copies(values: Sequence[tuple[keras.Variable, Array]]) -> Generator[list[tf.Variable]]:
    """Context in which new `tf.Variable`s with the given values hold the Keras variables' values; yields these."""
    held = [variable._value for variable, _ in values]
    try:
        for variable, value in values:
            replace_value(variable, value)
        yield [variable._value for variable, _ in values]
    finally:
        for (variable, _), value in zip(values, held, strict=True):
            variable._value = value


def handles_of(variables: Iterable[keras.Variable]) -> set[int]:
    """The `id`s of the resources that hold the variables on this worker."""
    held = [part for variable in variables for part in local_replica_values(variable._value)]
    return {id(part.handle) for part in held if hasattr(part, "handle")}


@contextlib.contextmanager
def following_keys(
    optimizer: keras.optimizers.Optimizer | None, variables: Sequence[keras.Variable]
) -> Generator[None]:
    """Context in which variables move to other `tf.Variable`s; at its end, renames an optimizer's keys of them."""
    before = [optimizer._var_key(variable) for variable in variables] if optimizer else []
    yield
    after = [optimizer._var_key(variable) for variable in variables] if optimizer else []
    rename_keys(optimizer, {old: new for old, new in zip(before, after, strict=True) if old != new})


def rename_keys(optimizer: keras.optimizers.Optimizer, keys: dict[str | int, str | int]) -> None:
    """Replaces an optimizer's keys of variables, which change with the `tf.Variable` that holds them."""
    for inner in held_optimizers(optimizer):
        for attribute in vars(inner).values():
            if isinstance(attribute, dict):
                for key in keys.keys() & attribute.keys():
                    value = attribute[key]
                    # TensorFlow doesn't notice `pop` on a tracked dictionary, and would no longer save the dictionary.
                    del attribute[key]
                    attribute[keys[key]] = value
            elif isinstance(attribute, set):
                # The variables excluded from weight decay.
                old = keys.keys() & attribute
                attribute.difference_update(old)
                attribute.update(keys[key] for key in old)


def _saved_variables(optimizer: keras.optimizers.Optimizer) -> Iterator[SavedVariables]:
    return (attribute for attribute in vars(optimizer).values() if isinstance(attribute, SavedVariables))
