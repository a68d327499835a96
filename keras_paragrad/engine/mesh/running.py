"""Runs a model's steps on a mesh: moves the variables there once, and each batch.

for each batch: divide it by rows, run the compiled step by DTensor, gather the logs
before the first step: build the model, move its variables, and compare the gradient with one device's
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_variables, overrides_test_step
from keras_paragrad.compat.state import replace_methods, restore_methods
from keras_paragrad.compat.types import Batch, GradientTensor, Step, StepLogs, Structure, TensorVariable
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.mesh.mesh_tracing import ROWS, explaining_errors
from keras_paragrad.engine.pipeline.placement import name_stems
from keras_paragrad.engine.replicas.evaluation import static_test_step
from keras_paragrad.engine.replicas.prepared import drop_functions, make_on_demand
from keras_paragrad.engine.step.building import build_from_data
from keras_paragrad.engine.step.execution import StepExecution
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.dtensor import (
    Axes,
    Mesh,
    axis_size,
    discard_assignments,
    distribute,
    gather_dtensor,
    on_mesh,
)
from keras_paragrad.storage.mesh_variable import MeshVariable
from keras_paragrad.storage.model_variables import (
    TracedState,
    accumulated_variables,
    build_model_optimizer,
    following_keys,
    replace_value,
    training_variables,
)
from keras_paragrad.storage.storage import storage_of

# For a variable, the mesh axes that divide its dimensions, and whether steps read it whole on each device.
Placement = tuple[Axes, bool]


def put_on_mesh(model: keras.Model, mesh: Mesh, place: Callable[[keras.Variable], Placement]) -> None:
    """Moves all variables of a step to a mesh, except the ones already there.

    `place` maps a model variable to its placement. An optimizer's slot of the same shape is divided like its variable;
    all other variables are whole on each device.
    """
    sections = training_variables(model)
    by_name = {variable.path.replace("/", "_"): variable for variable in sections["model"]}
    accumulators = accumulated_variables(model.optimizer)
    pairs = [(section, variable) for section, variables in sections.items() for variable in variables]
    pairs = [(section, variable) for section, variable in pairs if _mesh_variable_of(variable) is None]
    with following_keys(model.optimizer, [variable for _, variable in pairs]):
        for section, variable in pairs:
            owner = variable if section == "model" else accumulators.get(id(variable))
            owner = _owner_of(variable, by_name) if owner is None else owner
            axes, whole = place(owner) if owner is not None else ((None,) * len(variable.shape), False)
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


def take_off_mesh(model: keras.Model) -> None:
    """Moves all variables of a model back to the host."""
    window = StepBuilder.of(model).loss_window
    # Steps traced before the model moved to the mesh would update variables that are replaced now.
    StepBuilder.of(model).retrace()
    sections = [*training_variables(model).values(), window.variables.values() if window else ()]
    meshed = [variable for variables in sections for variable in variables if _mesh_variable_of(variable) is not None]
    with following_keys(model.optimizer, meshed), tf.device("CPU:0"):
        for variable in meshed:
            replace_value(variable, tf.convert_to_tensor(variable.value))


def _mesh_variable_of(variable: keras.Variable) -> MeshVariable | None:
    storage = variable._value
    return storage if isinstance(storage, MeshVariable) else None


def _owner_of(slot: keras.Variable, by_name: dict[str, keras.Variable]) -> keras.Variable | None:
    """The variable to which an optimizer's slot belongs, if both have the same shape."""
    # Keras names a slot after its variable.
    owner = next((by_name[stem] for stem in name_stems(slot.name) if stem in by_name), None)
    return owner if owner is not None and tuple(owner.shape) == tuple(slot.shape) else None


def variables_on_mesh(model: keras.Model) -> Iterator[tuple[keras.Variable, MeshVariable]]:
    """The variables of a model and its optimizer that are on a mesh, and their storages."""
    sections = training_variables(model)
    for variable in (*sections["model"], *sections["optimizer"]):
        storage = _mesh_variable_of(variable)
        if storage is not None:
            yield variable, storage


# Stages that haven't been compared with one device.
_UNTESTED = ("split", "transform", "observe", "present")
_METHODS = ("make_test_function", "make_predict_function")


class ModelOnMesh:
    """Fills the *mesh* stage: moves batches to a mesh, and the results of a step back.

    `batch_axis` is the mesh axis that divides rows. `place` maps a variable of the model to its placement, and
    `tracing` makes the context in which to trace a step. `check` gets the first training batch and this object, when
    the variables are on the mesh.
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
        self.model, self.mesh, self.batch_axis = model, mesh, batch_axis
        self.place, self.tracing, self.check = place, tracing, check
        self._traced = TracedState()

    def install(self) -> None:
        """Makes the model train, evaluate and predict on the mesh."""
        StepBuilder.of(self.model).fill(mesh=self.wrap, place=self.tracing)
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
        """Makes a compiled training step run on the mesh, with batches from the host. Refuses untested stages."""
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
        """Moves batches to the mesh for a step, and logs back. Calls `prepare` with the first batch."""
        ready = False

        def run(data: Batch) -> Structure:
            nonlocal ready
            if not ready:
                # Metrics have to be built here, as a step can't create variables on the mesh.
                build_from_data(self.model, data_batch=data)
                StepBuilder.of(self.model).make_loss_window()
                prepare(data)
                ready = True
            return self._run(step, data)

        return run

    def _run(self, function: Callable[[Batch], Structure], data: Batch) -> Structure:
        """Runs a function on the mesh for a batch from the host, and gathers the results."""
        batch = self.batch(data)
        with on_mesh(self.mesh), explaining_errors(self.model):
            results = function(batch)
        return keras.tree.map_structure(gather_dtensor, results)

    def batch(self, data: Batch) -> Batch:
        """Moves a batch to the mesh, divided by rows. It stays whole if the axis doesn't divide their number."""
        rows = batch_rows(data)
        even = self.batch_axis is not None and rows and rows % axis_size(self.mesh, self.batch_axis) == 0
        # If this batch causes a trace of the step, the trace reads these.
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

        def on_mesh(step: Step) -> Step:
            return self._wrap(step, lambda data: self.put_variables())

        return StepExecution(self.model, Stages(mesh=on_mesh)).function([step])

    def _predict_function(self) -> Callable[[list[Batch]], Structure]:
        def step(data: Batch) -> Structure:
            with self.tracing():
                return self.model.predict_step(data)

        compiled: Callable[[Batch], Structure] = step
        if not self.model.run_eagerly:
            compiled = tf.function(step, jit_compile=self.model.jit_compile or None, autograph=False)

        def run(data: Batch) -> Structure:
            self.put_variables()
            return self._run(compiled, data)

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


if TYPE_CHECKING:
    from keras_paragrad.engine.mesh.running import ModelOnMesh

# Gradients smaller than this, relative to the largest, are rounding errors: an attention's key bias has such.
_SMALL = 1e-3
_TINY = 1e-30
_ZERO = tf.UnconnectedGradients.ZERO


def gradient_error(model: keras.Model, data: Batch, model_on_mesh: "ModelOnMesh") -> tuple[float, str]:
    """The largest error of a variable's gradient on a mesh, and the variable's path. Computed without dropout.

    The error is relative to the largest entry of the variable's gradient on one device, or to `_SMALL` times the
    largest entry of all gradients, if that is larger.
    """
    variables = list(model.trainable_variables)
    if not variables:
        return 0.0, ""
    expected = list(map(_to_numpy, _gradients_on_one_device(model, data, variables)))
    function = tf.function(
        lambda batch: _gradients_on_mesh(model, batch, variables, model_on_mesh), jit_compile=None, autograph=False
    )
    batch = model_on_mesh.batch(data)
    with on_mesh(model_on_mesh.mesh), explaining_errors(model):
        actual = list(map(_to_numpy, function(batch)))
    # Gradients that aren't finite on one device can't be compared.
    compared = [each for each in zip(variables, expected, actual, strict=True) if np.isfinite(each[1]).all()]
    least = _SMALL * max((_largest(theirs) for _, theirs, _ in compared), default=0.0)
    # Where one device has zeros, any difference is too large. So is NaN, which `max` might drop.
    errors = (
        (
            float(np.nan_to_num(_largest(ours - theirs), nan=np.inf)) / max(_largest(theirs), least, _TINY),
            str(each.path),
        )
        for each, theirs, ours in compared
    )
    return max(errors, default=(0.0, ""))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0))


def _to_numpy(gradient: tf.Tensor) -> np.ndarray:
    return np.asarray(gather_dtensor(gradient)).astype("float64")


def _gradients_on_one_device(model: keras.Model, data: Batch, trainable: list[keras.Variable]) -> list[tf.Tensor]:
    """Computes the gradients on the host, with the variables' values as arguments."""
    # The model was made on the host.
    with tf.device("CPU:0"):
        variables = all_variables(model)
        indices = {id(variable): index for index, variable in enumerate(variables)}

        # Traced as in `fit`: in eager mode, Keras's layers lose some masks.
        @tf.function(autograph=False)
        def gradients(data: Batch, values: list[tf.Tensor]) -> list[tf.Tensor]:
            sources = [values[indices[id(variable)]] for variable in trainable]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                mapping = list(zip(variables, values, strict=True))
                with untouched(model, keras.StatelessScope(state_mapping=mapping, collect_losses=True)):
                    loss = compute_loss(model, data, training=False).loss
            return _dense(tape.gradient(loss, sources, unconnected_gradients=_ZERO))

        data = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)
        return gradients(data, [tf.convert_to_tensor(variable.value) for variable in variables])


def _gradients_on_mesh(
    model: keras.Model, data: Batch, trainable: list[keras.Variable], model_on_mesh: "ModelOnMesh"
) -> list[tf.Tensor]:
    """Traces the gradients on a mesh; the variables keep their values."""
    with model_on_mesh.tracing():
        with tf.GradientTape() as tape, untouched(model, discard_assignments()):
            loss = compute_loss(model, data, training=False).loss
        sources: list[TensorVariable] = [storage_of(variable).local for variable in trainable]
        return _dense(tape.gradient(loss, sources, unconnected_gradients=_ZERO))


def _dense(gradients: Sequence[GradientTensor]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]
