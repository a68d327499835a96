"""Runs a model's steps on a mesh: moves its variables there, and each batch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.model import overrides_test_step
from keras_paragrad.compat.state import replace_methods, restore_methods
from keras_paragrad.compat.types import Batch, Step, StepLogs, Structure
from keras_paragrad.engine.mesh.mesh_tracing import explaining_errors
from keras_paragrad.engine.mesh.pinning import ROWS
from keras_paragrad.engine.pipeline.placement import name_stems
from keras_paragrad.engine.replicas.evaluation import static_test_step
from keras_paragrad.engine.replicas.prepared import drop_functions, make_on_demand
from keras_paragrad.engine.step.building import build_from_data
from keras_paragrad.engine.step.execution import StepExecution
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.dtensor import Axes, Mesh, axis_size, distribute, gather_dtensor, on_mesh
from keras_paragrad.storage.mesh_variable import MeshVariable
from keras_paragrad.storage.model_variables import (
    TracedState,
    accumulated_variables,
    build_model_optimizer,
    rename_keys,
    replace_value,
    training_variables,
)

# The mesh axes that divide a variable's dimensions, and whether steps read it whole on each device.
Placement = tuple[Axes, bool]


def put_on_mesh(model: keras.Model, mesh: Mesh, place: Callable[[keras.Variable], Placement]) -> None:
    """Moves all variables of a step to a mesh, except the ones already there.

    `place` maps a model variable to its placement. An optimizer's slot of the same shape is divided like its variable;
    all other variables are whole on each device.
    """
    sections = training_variables(model)
    by_name = {variable.path.replace("/", "_"): variable for variable in sections["model"]}
    accumulators = accumulated_variables(model.optimizer)
    # An optimizer finds a variable by a key that changes with the storage.
    keys = []
    for section, variables in sections.items():
        for variable in variables:
            if mesh_variable_of(variable) is not None:
                continue
            owner = variable if section == "model" else accumulators.get(id(variable))
            owner = _owner_of(variable, by_name) if owner is None else owner
            axes, whole = place(owner) if owner is not None else ((None,) * len(variable.shape), False)
            keys.append((_key(model.optimizer, variable), variable))
            storage: Any = MeshVariable(
                value=variable.numpy(),
                mesh=mesh,
                axes=axes,
                name=variable.name,
                # Tapes watch by this flag, which stays when a layer is frozen.
                trainable=variable._value.trainable,
            )
            storage.whole_in_steps = whole and section == "model"
            variable._initialize(storage)
    rename_keys(model.optimizer, {before: _key(model.optimizer, variable) for before, variable in keys})


def take_off_mesh(model: keras.Model) -> None:
    """Moves all variables of a model back to the host."""
    keys = []
    window = StepBuilder.of(model).loss_window
    # Steps traced before the model moved to the mesh would update variables that are replaced now.
    StepBuilder.of(model).retrace()
    sections = [*training_variables(model).values(), window.variables.values() if window else ()]
    for variable in [variable for variables in sections for variable in variables]:
        if mesh_variable_of(variable) is not None:
            keys.append((_key(model.optimizer, variable), variable))
            with tf.device("CPU:0"):
                replace_value(variable, tf.convert_to_tensor(variable.value))
    rename_keys(model.optimizer, {before: _key(model.optimizer, variable) for before, variable in keys})


def mesh_variable_of(variable: keras.Variable) -> MeshVariable | None:
    """The `MeshVariable` that stores a variable, or `None`."""
    storage = variable._value
    return storage if isinstance(storage, MeshVariable) else None


def _owner_of(slot: keras.Variable, by_name: dict[str, keras.Variable]) -> keras.Variable | None:
    """The variable to which an optimizer's slot belongs, if they have the same shape."""
    # Keras names a slot after its variable.
    owner = next((by_name[stem] for stem in name_stems(slot.name) if stem in by_name), None)
    return owner if owner is not None and tuple(owner.shape) == tuple(slot.shape) else None


def _key(optimizer: keras.optimizers.Optimizer | None, variable: keras.Variable) -> str | int:
    return optimizer._var_key(variable) if optimizer is not None else id(variable)


def variables_on_mesh(model: keras.Model) -> Iterator[tuple[keras.Variable, MeshVariable]]:
    """The variables of a model and its optimizer that are on a mesh, and their storages."""
    sections = training_variables(model)
    for variable in (*sections["model"], *sections["optimizer"]):
        storage = mesh_variable_of(variable)
        if storage is not None:
            yield variable, storage


# Stages that have not been tested against one device.
_UNTESTED = ("split", "transform", "observe", "present")
_METHODS = ("make_test_function", "make_predict_function")


class ModelOnMesh:
    """Fills the *mesh* stage: moves batches to a mesh, and the results of a step back.

    Args:
        batch_axis: The mesh axis that divides the rows of a batch.
        place: Maps one of the model's variables to its placement.
        tracing: Makes the context in which to trace a step.
        check: Called with the first training batch and this object, when the variables are on the mesh.
    """

    def __init__(
        self,
        model: keras.Model,
        mesh: Mesh,
        batch_axis: str | None,
        place: Callable[[keras.Variable], Placement],
        tracing: Callable[[], contextlib.AbstractContextManager[None]],
        check: Callable[[Batch, "ModelOnMesh"], None],
    ):
        self.model: keras.Model = model
        self.mesh, self.batch_axis, self.place, self.tracing = mesh, batch_axis, place, tracing
        self.check = check
        self._traced = TracedState()

    def install(self) -> None:
        """Makes the model train, evaluate and predict on the mesh."""
        StepBuilder.of(self.model).fill(mesh=self, place=self.tracing)
        replace_methods(
            self.model,
            make_test_function=make_on_demand(self.model, "test_function", self._test_function),
            make_predict_function=make_on_demand(self.model, "predict_function", self._predict_function),
        )
        self.put_variables()
        if self._traced.update(self.model):
            drop_functions(self.model)

    def uninstall(self) -> None:
        """Restores the methods of the model's class."""
        restore_methods(self.model, *_METHODS)
        StepBuilder.of(self.model).fill(mesh=None, place=None)
        drop_functions(self.model)

    def put_variables(self) -> None:
        """Moves variables that aren't on the mesh yet."""
        put_on_mesh(self.model, self.mesh, self.place)

    def wrap(self, step: Step) -> Step:
        """Makes a compiled training step run on the mesh, with batches from the host; refuses untested stages."""
        stages = StepBuilder.of(self.model).stages
        name = next((stage for stage in _UNTESTED if getattr(stages, stage) is not None), None)
        if name:
            raise ValueError(
                f"{self.model.name!r} is trained on a mesh, where a component that fills the stage {name} of a step "
                f"({type(getattr(stages, name)).__name__}) has not been compared with one device. Leave it out, or "
                'train with DistributedFit("mirrored", shard="parameters").'
            )

        def prepare(data: Batch) -> None:
            build_model_optimizer(self.model)
            self.put_variables()
            self.check(data, self)

        return self._wrap(step, prepare)

    def _wrap(self, step: Callable[[Batch], Structure], prepare: Callable[[Batch], None]) -> Callable[[Batch], Any]:
        """Moves batches to the mesh for a step, and its logs back; before the first, calls `prepare` with the batch."""
        ready = False

        def run(data: Batch) -> Structure:
            nonlocal ready
            if not ready:
                # A step can't create variables on the mesh, such as metrics' variables.
                build_from_data(self.model, data_batch=data)
                StepBuilder.of(self.model).make_loss_window()
                prepare(data)
                ready = True
            batch = self.batch(data)
            with on_mesh(self.mesh), explaining_errors(self.model):
                logs = step(batch)
            return keras.tree.map_structure(gather_dtensor, logs)

        return run

    def batch(self, data: Batch) -> Batch:
        """Moves a batch to the mesh, divided by rows; whole on each device if its size isn't divisible."""
        rows = batch_rows(data)
        even = self.batch_axis is not None and rows and rows % axis_size(self.mesh, self.batch_axis) == 0
        # Read by the trace of a step, if this batch causes one.
        ROWS.count, ROWS.axis = rows, self.batch_axis if even else None

        def put(leaf: tf.Tensor) -> tf.Tensor:
            if leaf is None:
                return None
            _check_dense(leaf)
            axes: list[str | None] = [None] * len(leaf.shape)
            if even and axes and leaf.shape[0] == rows:
                axes[0] = self.batch_axis
            return distribute(leaf, self.mesh, tuple(axes))

        return keras.tree.map_structure(put, data)

    def _test_function(self) -> Step:
        def step(data: Batch) -> StepLogs:
            with self.tracing():
                model = self.model
                return model.test_step(data) if overrides_test_step(model) else static_test_step(model, data)

        on_mesh = lambda step: self._wrap(step, lambda data: self.put_variables())  # noqa: E731
        return StepExecution(on_mesh=on_mesh).function(self.model, [step])

    def _predict_function(self) -> Callable[[list[Batch]], Structure]:
        """Builds `model.predict_function`."""

        def step(data: Batch) -> Structure:
            with self.tracing():
                return self.model.predict_step(data)

        compiled: Callable[[Batch], Structure] = step
        if not self.model.run_eagerly:
            compiled = tf.function(step, jit_compile=self.model.jit_compile or None, autograph=False)

        def run(data: Batch) -> Structure:
            self.put_variables()
            batch = self.batch(data)
            with on_mesh(self.mesh), explaining_errors(self.model):
                outputs = compiled(batch)
            return keras.tree.map_structure(gather_dtensor, outputs)

        def predict(batches: list[Batch]) -> Structure:
            outputs = [run(batch) for batch in batches]
            with tf.device("CPU:0"):
                return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        return predict


def batch_rows(data: Batch) -> int:
    """The number of rows of a batch; 0 if it has none."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return next((int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)), 0)


def _check_dense(leaf: Any) -> None:
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) or leaf.dtype == tf.string:
        kind = "strings" if leaf.dtype == tf.string else f"a {type(leaf).__name__}"
        raise ValueError(
            f"A batch has {kind}, and a mesh takes dense numbers only. Turn them into dense numbers in the dataset: "
            "dataset.map(...), with x.to_tensor(), tf.sparse.to_dense(x) or a lookup layer."
        )
