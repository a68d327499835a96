"""Keras's variables, put on a mesh and taken off again."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.engine.pipeline.placement import name_stems
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.storage.dtensor import Axes
from keras_paragrad.storage.mesh_variable import MeshVariable
from keras_paragrad.storage.model_variables import accumulated_variables, rename_keys, replace_value, training_variables

# What a variable's dimensions are divided along, and whether steps read it whole.
Placed = tuple[Axes, bool]


def put_on_mesh(model: Any, mesh: Any, place: Callable[[keras.Variable], Placed]) -> None:
    """Divides every variable that a step reads or writes over a mesh; those that are there stay.

    Args:
        model: A model, whose optimizer is built.
        mesh: The mesh.
        place: How one of the model's variables is divided. What an optimizer has for a variable, in its shape, is
            divided as that is; all else is whole on each device.
    """
    sections = training_variables(model)
    known = {variable.path.replace("/", "_"): variable for variable in sections["model"]}
    accumulators = accumulated_variables(model.optimizer)
    keys = []
    for section, variables in sections.items():
        for variable in variables:
            if storage_on_mesh(variable) is not None:
                continue
            own = variable if section == "model" else accumulators.get(id(variable))
            own = _belongs_to(variable, known) if own is None else own
            axes, whole = place(own) if own is not None else ((None,) * len(variable.shape), False)
            keys.append((_key(model.optimizer, variable), variable))
            storage: Any = MeshVariable(
                value=variable.numpy(),
                mesh=mesh,
                axes=axes,
                name=variable.name,
                trainable=variable._value.trainable,
            )
            storage.whole_in_steps = whole and section == "model"
            variable._initialize(storage)
    rename_keys(model.optimizer, {before: _key(model.optimizer, variable) for before, variable in keys})


def take_off_mesh(model: Any) -> None:
    """Keeps every variable of a model whole on the host again."""
    keys = []
    window = StepBuilder.of(model).loss_window
    # A step that was traced before the model was on the mesh updates what its variables were then.
    StepBuilder.of(model).retrace()
    sections = [*training_variables(model).values(), window.variables.values() if window else ()]
    for variable in [each for variables in sections for each in variables]:
        if storage_on_mesh(variable) is not None:
            keys.append((_key(model.optimizer, variable), variable))
            with tf.device("CPU:0"):
                replace_value(variable, tf.convert_to_tensor(variable.value))
    rename_keys(model.optimizer, {before: _key(model.optimizer, variable) for before, variable in keys})


def storage_on_mesh(variable: keras.Variable) -> MeshVariable | None:
    """What holds a variable on a mesh, or `None` if it isn't on one."""
    storage = variable._value
    return storage if isinstance(storage, MeshVariable) else None


def _belongs_to(slot: keras.Variable, known: dict[str, keras.Variable]) -> keras.Variable | None:
    """The variable that a slot of an optimizer is for, if it has its shape."""
    # Keras names a slot after its variable.
    own = next((known[stem] for stem in name_stems(slot.name) if stem in known), None)
    return own if own is not None and tuple(own.shape) == tuple(slot.shape) else None


def _key(optimizer: Any, variable: keras.Variable) -> Any:
    return optimizer._var_key(variable) if optimizer is not None else id(variable)


def variables_on_mesh(model: Any) -> Iterator[tuple[keras.Variable, MeshVariable]]:
    """Each of a model's and its optimizer's variables that is on a mesh, and what holds it there."""
    sections = training_variables(model)
    for variable in (*sections["model"], *sections["optimizer"]):
        storage = storage_on_mesh(variable)
        if storage is not None:
            yield variable, storage
