"""Steps of a model, run on a mesh with batches from the host."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.method_patch import replace_methods, restore_methods
from keras_paragrad.compat.model import has_own_test_step
from keras_paragrad.engine.mesh.errors import explained
from keras_paragrad.engine.mesh.pinning import ROWS
from keras_paragrad.engine.mesh.placing import Placed, put_on_mesh
from keras_paragrad.engine.replicas.evaluation import tested
from keras_paragrad.engine.replicas.prepared import forget_functions, maker
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.execution import compile_steps
from keras_paragrad.engine.step.symbolic import build_from
from keras_paragrad.storage.dtensor import distribute, gather, on_mesh

_UNKNOWN = ("split", "transform", "observe", "present")
_METHODS = ("make_test_function", "make_predict_function")


class OnMesh:
    """Fills the *mesh* stage: takes batches to a mesh, and what a step returns back from it.

    Args:
        model: A compiled and built model.
        mesh: The mesh.
        batch_axis: The axis along which the rows of a batch are divided.
        place: How each of the model's variables is divided.
        tracing: Makes the context in which a step is traced.
        check: Is given the first batch to be trained on, with this, once variables are on the mesh.
    """

    def __init__(
        self,
        model: keras.Model,
        mesh: Any,
        batch_axis: str | None,
        place: Callable[[keras.Variable], Placed],
        tracing: Callable[[], contextlib.AbstractContextManager[None]],
        check: Callable[[Any, "OnMesh"], None],
    ):
        self.model: Any = model
        self.mesh, self.batch_axis, self.place, self.tracing = mesh, batch_axis, place, tracing
        self.check = check

    def install(self) -> None:
        """Has the model trained, evaluated and used for prediction on the mesh."""
        StepBuilder.of(self.model).fill(mesh=self, place=self.tracing)
        replace_methods(
            self.model,
            make_test_function=maker(self.model, "test_function", self._test_function),
            make_predict_function=maker(self.model, "predict_function", self._predict_function),
        )
        forget_functions(self.model)
        self.put_variables()

    def uninstall(self) -> None:
        """Restores the methods of the model's class."""
        restore_methods(self.model, *_METHODS)
        StepBuilder.of(self.model).fill(mesh=None, place=None)
        forget_functions(self.model)

    def put_variables(self) -> None:
        """Puts all variables on the mesh that aren't there yet."""
        put_on_mesh(self.model, self.mesh, self.place)

    def running(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A compiled step, run on the mesh with batches from outside of it.

        Raises:
            ValueError: A component fills a stage that has not been compared with one device on a mesh.
        """
        stages = StepBuilder.of(self.model).stages
        found = [name for name in _UNKNOWN if getattr(stages, name) is not None]
        if found:
            raise ValueError(
                f"{self.model.name!r} is trained on a mesh, where a component that fills the stage "
                f"{found[0]} of a step ({type(getattr(stages, found[0])).__name__}) has not been compared with one "
                "device. Leave it out, or "
                'train with DistributedFit("mirrored", shard="parameters").'
            )
        return self._running(step, lambda data: self.check(data, self))

    def running_any(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same, of a step that doesn't train: its batches may be of any size."""
        return self._running(step, lambda data: None)

    def _running(self, step: Callable[[Any], Any], check: Callable[[Any], None]) -> Callable[[Any], Any]:
        ready = False

        def run(data: Any) -> Any:
            nonlocal ready
            if not ready:
                # Metrics make their variables here, and not in a step, which can't make any on the mesh.
                build_from(self.model, data_batch=data)
                StepBuilder.of(self.model).make_loss_window()
                self.put_variables()
                check(data)
                ready = True
            batch = self.batch(data)
            with on_mesh(self.mesh), explained(self.model):
                found = step(batch)
            return keras.tree.map_structure(gather, found)

        return run

    def batch(self, data: Any) -> Any:
        """A batch on the mesh: its rows divided, or whole on each device if there are too few."""
        rows = rows_in(data)
        even = self.batch_axis is not None and rows and rows % self.mesh.dim_size(self.batch_axis) == 0
        # For the step that is traced with it, if any is.
        ROWS.count, ROWS.axis = rows, self.batch_axis if even else None

        def put(leaf: Any) -> Any:
            if leaf is None:
                return None
            _check_dense(leaf)
            axes: list[str | None] = [None] * len(leaf.shape)
            if even and axes and leaf.shape[0] == rows:
                axes[0] = self.batch_axis
            return distribute(leaf, self.mesh, tuple(axes))

        return keras.tree.map_structure(put, data)

    def _test_function(self) -> Callable[[Any], dict]:
        def step(data: Any) -> dict:
            with self.tracing():
                return self.model.test_step(data) if has_own_test_step(self.model) else tested(self.model, data)

        return compile_steps(self.model, [step], mesh=_Untrained(self))

    def _predict_function(self) -> Callable[[list], Any]:
        def step(data: Any) -> Any:
            with self.tracing():
                return self.model.predict_step(data)

        compiled: Any = step
        if not self.model.run_eagerly:
            compiled = tf.function(step, jit_compile=self.model.jit_compile or None, autograph=False)

        def run(data: Any) -> Any:
            self.put_variables()
            batch = self.batch(data)
            with on_mesh(self.mesh), explained(self.model):
                found = compiled(batch)
            return keras.tree.map_structure(gather, found)

        def predict(batches: list) -> Any:
            outputs = [run(batch) for batch in batches]
            with tf.device("CPU:0"):
                return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

        return predict


class _Untrained(NamedTuple):
    """Runs steps that don't train."""

    on_mesh: OnMesh

    def running(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A compiled step, run on the mesh."""
        return self.on_mesh.running_any(step)


def rows_in(data: Any) -> int:
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return next((int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)), 0)


def _check_dense(leaf: Any) -> None:
    if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) or leaf.dtype == tf.string:
        found = "strings" if leaf.dtype == tf.string else f"a {type(leaf).__name__}"
        raise ValueError(
            f"A batch has {found}, and a mesh takes dense numbers only. Turn them into dense numbers in the dataset: "
            "dataset.map(...), with x.to_tensor(), tf.sparse.to_dense(x) or a lookup layer."
        )
