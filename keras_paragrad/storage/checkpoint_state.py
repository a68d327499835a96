"""All variables needed to resume training, and the epoch and batch to resume at."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_paragrad.compat.check import check_objects
from keras_paragrad.compat.saved import SavedVariables
from keras_paragrad.compat.state import state_of


def training_variables(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Every variable that a step reads or writes, by what it belongs to; in the same order in every process."""
    optimizers = with_inner(model.optimizer)
    sections = {
        "model": model.variables,
        "optimizer": [variable for optimizer in optimizers for variable in variables_of(optimizer)],
        "metrics": [*model.metrics_variables, *_loss_window(model)],
    }
    seen: set[int] = set()
    return {name: [each for each in variables if _is_new(each, seen)] for name, variables in sections.items()}


def assign_all(sections: dict[str, list[keras.Variable]], values: dict[str, Iterable[np.ndarray]]) -> None:
    """Restores the values of the variables, on any number of replicas; all workers must call this."""
    for name, variables in sections.items():
        for variable, value in zip(variables, values[name], strict=True):
            variable.assign(value)


def add_all(sections: dict[str, list[keras.Variable]], values: dict[str, Iterable[np.ndarray]]) -> None:
    """Adds values to the variables, as those of another replica are added; all workers must call this."""
    for name, variables in sections.items():
        for variable, value in zip(variables, values[name], strict=True):
            variable.assign(variable.numpy() + value)


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables, if no step has."""
    if model.optimizer is not None and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def begin_in(model: Any, epoch: int | None) -> None:
    """Sets the epoch at which the running `fit` and later ones begin; `None` resets it."""
    check_objects()
    model._initial_epoch = epoch


def with_inner(optimizer: Any) -> list[Any]:
    """An optimizer, and all that it delegates to."""
    if optimizer is None:
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(found for each in inner for found in with_inner(each))]


def variables_of(optimizer: Any) -> list[keras.Variable]:
    """The variables of an optimizer, and those of a window that it accumulates gradients in."""
    saved = [part for part in vars(optimizer).values() if isinstance(part, SavedVariables)]
    return [*optimizer.variables, *(variable for part in saved for variable in part.variables.values())]


def counterparts_in(optimizer: Any) -> dict[int, keras.Variable]:
    """By the `id` of a variable that an optimizer accumulates gradients in, the variable whose gradients these are."""
    saved = [part for each in with_inner(optimizer) for part in vars(each).values() if isinstance(part, SavedVariables)]
    return {accumulator: variable for part in saved for accumulator, variable in part.counterparts.items()}


def _loss_window(model: keras.Model) -> list[keras.Variable]:
    builder = state_of(model).step_builder
    if builder is None or not builder.stages.apply or builder.loss_window is None:
        return []
    return list(builder.loss_window.variables.values())


def _is_new(variable: keras.Variable, seen: set[int]) -> bool:
    new = id(variable) not in seen
    seen.add(id(variable))
    return new
