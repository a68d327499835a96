"""Puts a model on a mesh, and has `fit`, `evaluate` and `predict` run there."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import train_together
from keras_paragrad.compat.model import all_layers, compiled_as, has_own_train_step
from keras_paragrad.compat.workers import barrier
from keras_paragrad.distribution.data import DistributedData
from keras_paragrad.distribution.mesh.checks import check_batch, check_model
from keras_paragrad.distribution.mesh.layouts import check_patterns, computed_divided, layouts_of, with_automatic_layout
from keras_paragrad.distribution.mesh.mesh import Mesh
from keras_paragrad.distribution.mesh.table import LayoutTable
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.engine.mesh.comparing import gradient_differs
from keras_paragrad.engine.mesh.placing import take_off_mesh
from keras_paragrad.engine.mesh.running import OnMesh, rows_in
from keras_paragrad.engine.mesh.tracing import Outputs, traced_for_mesh
from keras_paragrad.storage.dtensor import (
    COMBINE_PASS,
    distribute,
    make_mesh,
    on_mesh,
    turn_combine_pass_off,
)
from keras_paragrad.storage.mesh_variable import MeshVariable
from keras_paragrad.storage.model_variables import build_optimizer

_RATE = 0.1


def check_steps(mesh: Mesh) -> None:
    """Compares two steps of a small model on a mesh with those of one device."""
    turn_combine_pass_off()
    error = steps_differ(tuple(mesh.shape.items()), mesh.devices, mesh.batch_axis, mesh.workers, mesh.worker)
    if error > 1e-5:
        raise RuntimeError(
            f"On a mesh of {mesh.words} this process trains a small model wrong, by {error:.1e} of its largest weight. "
            f"TensorFlow may have compiled something on a mesh before DistributedFit was made, without "
            f"{COMBINE_PASS}=0 in the environment. Start Python with it, or write "
            'DistributedFit("mirrored", shard="parameters").'
        )


@functools.cache
def steps_differ(
    shape: tuple[tuple[str, int], ...], devices: tuple[str, ...], batch_axis: str | None, workers: int, worker: int
) -> float:
    """How far two steps of a perceptron with several all-reduces are from one device's, of its largest weight."""
    sizes = dict(shape)
    mesh = make_mesh(sizes, devices, workers, worker)
    # Every axis divides every size.
    unit = int(np.prod(list(sizes.values())))
    random = np.random.default_rng(0)
    shapes = [(unit, 2 * unit), (2 * unit, 3 * unit), (3 * unit, unit), 2 * unit, 3 * unit, unit]
    weights = [random.normal(size=shape).astype("float32") for shape in shapes]
    x, y = random.normal(size=(2, 4 * unit, unit)).astype("float32")
    model_axis = next((name for name in sizes if name != batch_axis), None)
    # The first two weights form a pair, column then row.
    axes = [(None, model_axis), (model_axis, None), (None, None), (model_axis,), (None,), (None,)]
    with tf.device("CPU:0"):
        alone: list[Any] = [tf.Variable(tf.constant(weight)) for weight in weights]
        _two_steps(alone, tf.constant(x), tf.constant(y))
    parted: list[Any] = [
        MeshVariable(value=weight, mesh=mesh, axes=each, name="checked", trainable=True)
        for weight, each in zip(weights, axes, strict=True)
    ]
    data = [distribute(each, mesh, (batch_axis, None)) for each in (x, y)]
    with on_mesh(mesh):
        _two_steps(parted, *data)
    found = [np.abs(each.numpy() - one.numpy()).max() for each, one in zip(parted, alone, strict=True)]
    return float(max(found) / max(np.abs(one.numpy()).max() for one in alone))


def _two_steps(variables: list[Any], x: Any, y: Any) -> None:
    step: Callable[..., None] = tf.function(functools.partial(_step, variables), autograph=False)
    for _ in range(2):
        step(x, y)


def _step(variables: list[Any], x: Any, y: Any) -> None:
    first, second, third, *biases = variables
    with tf.GradientTape() as tape:
        hidden = tf.nn.tanh(x @ first + biases[0])
        hidden = tf.nn.tanh(hidden @ second + biases[1])
        loss = tf.reduce_mean(tf.square(hidden @ third + biases[2] - y))
    gradients: list[Any] = tape.gradient(loss, variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(_RATE * gradient)


# Rounding is 1e-6 of a float32 gradient, and what a wrong rule mixes up is about as large as the gradient itself.
_TOLERANCES = {"float64": 1e-2, "float32": 1e-2}


class MeshPreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` run on a mesh, with the results of one device.

    Args:
        model: A compiled and built model.
        mesh: The mesh. Without a distribution, the layout is found from the model's structure.
        jit: Whether XLA compiles the step; if `None`, as the model was compiled.
        together: By which the mesh's workers talk to each other, or `None` if there is one.

    Raises:
        ValueError: A layout doesn't fit, or the model can't be trained on a mesh. The message says what to write.
        RuntimeError: This TensorFlow trains wrong on such a mesh.
    """

    def start(self) -> None:
        model, mesh = self.model, self.settings[0]
        check_model(model)
        mesh = mesh if mesh.distribution is not None else with_automatic_layout(model, mesh)
        self.mesh = mesh
        check_patterns(model, mesh, None)
        self._layouts = layouts_of(model, mesh)
        self._divided = computed_divided(model, self._layouts)
        check_steps(mesh)
        self._outputs = Outputs(mesh.distribution)
        devices = make_mesh(mesh.shape, mesh.devices, mesh.workers, mesh.worker)
        self._on_mesh = OnMesh(model, devices, mesh.batch_axis, self._place, self._tracing, self._check_first)
        # What was compiled, and trained, when the gradient of the first batch was that of one device.
        self._compared: Any = None

    def renew(self) -> None:
        check_model(self.model)
        _, jit, together = self.settings
        if jit is not None:
            self.set_jit_compile(jit)
        build_optimizer(self.model)
        if together is not None:
            train_together(self.model, together)
            methods = ("fit", "evaluate", "predict")
            self.replace(**{name: functools.partial(_on_workers, name, self.model) for name in methods})
        self._on_mesh.install()

    def stop(self) -> None:
        self._on_mesh.uninstall()
        train_together(self.model, None)
        take_off_mesh(self.model)

    @property
    def table(self) -> LayoutTable:
        """How each variable is divided, and what each device holds."""
        return LayoutTable.of(self.model, self.mesh)

    def _place(self, variable: keras.Variable) -> tuple[tuple[str | None, ...], bool]:
        axes = self._layouts.get(id(variable), (None,) * len(variable.shape))
        return axes, id(variable) not in self._divided

    def _check_first(self, data: Any, on_mesh: OnMesh) -> None:
        """Refuses what the first batch to be trained on shows to be wrong."""
        check_batch(rows_in(data), self.mesh)
        # What is compiled again may have another loss, and train what was frozen before.
        asked = compiled_as(self.model), [id(variable) for variable in self.model.trainable_variables]
        if has_own_train_step(self.model) or self._compared == asked:
            return
        error, path = gradient_differs(self.model, data, on_mesh)
        if error > tolerance(self.model):
            raise RuntimeError(
                f"The gradient of {path!r} on this mesh differs from that on one device, by {error:.1e} of its largest "
                "entry: TensorFlow has a wrong rule for an operation on divided tensors. Give this variable and those "
                "that are computed with it no layout, so that each device has them whole; or train with "
                'DistributedFit("mirrored", shard="parameters").'
            )
        self._compared = asked

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with traced_for_mesh(self.model, self._outputs):
            yield
        check_patterns(self.model, self.mesh, self._outputs.asked)


def _on_workers(method: str, model: Any, x: Any = None, *arguments: Any, **keywords: Any) -> Any:
    """A method of a model's class, that all workers call with the same data."""
    if method == "fit" and not isinstance(x, DistributedData):
        raise ValueError(
            "On a mesh of several workers each of them reads every batch, and fit alone would shuffle them in other "
            "orders. Write dist.fit(model, x, y), or model.fit(dist.dataset(x, y, batch_size=...))."
        )
    found = getattr(type(model), method)(model, x, *arguments, **keywords)
    barrier()
    return found


def tolerance(model: Any) -> float:
    """How far a gradient may be from that of one device, in parts of its own largest entry."""
    computed = {layer.compute_dtype for layer in all_layers(model)} - {None}
    return max((_TOLERANCES.get(str(dtype), 0.5) for dtype in computed), default=1e-2)
