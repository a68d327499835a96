"""`MeshVariable`: the value of a Keras variable that is divided over a mesh, and `Meshed`, its storage."""

import functools
import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.private import BaseResourceVariable, in_symbolic_scope
from keras_paragrad.compat.types import Array, GradientTensor, Scalar, TensorVariable
from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.storage.dtensor import (
    CONTEXT,
    Axes,
    Mesh,
    computing_on_mesh,
    distribute,
    gather_dtensor,
    make_variable,
    on_mesh,
    relayout,
)
from keras_paragrad.storage.storage import Parts, Storage

_IN_GRAPH = (
    "The model's variables are on a mesh of devices, and a function of one device reads or assigns them. Call undo() "
    "of the handle that dist.prepare(model) returned, which puts them back on one device. To export the model, load "
    "its weights into one that was built without DistributedFit."
)
# The methods of `tf.Variable` that write a part of it.
_WRITES = (
    *("scatter_update", "scatter_max", "scatter_min", "scatter_mul", "scatter_div", "batch_scatter_update"),
    *("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update", "scatter_nd_max", "scatter_nd_min"),
    "_strided_slice_assign",
)


# Not a `ResourceVariable`, as DTensor's variables are: TensorFlow's operations would read the handle directly.
class MeshVariable(BaseResourceVariable):
    """A variable that is divided over a mesh.

    In a step on the mesh, it reads and assigns DTensors. Elsewhere it is whole: reading gathers it, with the gradient
    of the whole, and assigning divides the value.

    Args:
        value: The whole value.
        axes: The axis of `mesh` along which each dimension is divided, or `None`.
        name, trainable: As in `tf.Variable`.

    Attributes:
        whole_in_steps: Whether a step, too, reads it whole on each device. Its gradient is divided again.
    """

    def __init__(self, *, value: Array, mesh: Mesh, axes: Axes, name: str, trainable: bool):
        # Keeps the handle's resource alive.
        self._dvariable = dvariable = make_variable(value, mesh=mesh, axes=axes, name=name, trainable=trainable)
        super().__init__(
            trainable=trainable,
            shape=dvariable.shape,
            dtype=dvariable.dtype,
            handle=dvariable.handle,
            name=name,
            unique_id=f"{name}_{uuid.uuid4().hex}",
            handle_name=name,
            in_graph_mode=False,
        )
        self.mesh, self.axes = mesh, axes
        self.whole_in_steps = False

    @property
    def storage(self) -> "Meshed":
        """The variable's `Storage`."""
        return Meshed(self)

    def divided_value(self) -> tf.Tensor:
        """The value as a DTensor."""
        return super()._read_variable_op()

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if computing_on_mesh():
            if CONTEXT.assigned is not None and id(self) in CONTEXT.assigned:
                return CONTEXT.assigned[id(self)]
            value = super()._read_variable_op(no_copy)
            gathers = self.whole_in_steps and any(self.axes)
            return relayout(value, (None,) * len(self.axes), self.axes) if gathers else value
        if in_symbolic_scope():
            return tf.zeros(self.shape, self.dtype)
        self._check_eager()
        with on_mesh(self.mesh):
            value = super()._read_variable_op(no_copy)
        whole: Any = _gather_with_gradient(value)
        return whole

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Gathers rows."""
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Gathers slices."""
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(
        self, value: Array, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> TensorVariable:
        """Assigns a whole value, or in a step a DTensor."""
        if computing_on_mesh():
            if CONTEXT.assigned is None:
                return super().assign(value, use_locking, name, read_value)
            # The assignment is discarded, and later reads of the step see it.
            recorded: Any = tf.cast(value, self.dtype)
            CONTEXT.assigned[id(self)] = recorded
            return recorded
        self._check_eager()
        parts = distribute(tf.cast(tf.convert_to_tensor(value), self.dtype), self.mesh, self.axes)
        with on_mesh(self.mesh):
            super().assign(parts, read_value=False)
        return self

    def assign_add(
        self, delta: Array, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> TensorVariable:
        """Adds a whole value, or in a step a DTensor."""
        if computing_on_mesh() and CONTEXT.assigned is None:
            return super().assign_add(delta, use_locking, name, read_value)
        return self.assign(self.read_value() + tf.cast(delta, self.dtype))

    def assign_sub(
        self, delta: Array, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> TensorVariable:
        """Subtracts a whole value, or in a step a DTensor."""
        if computing_on_mesh() and CONTEXT.assigned is None:
            return super().assign_sub(delta, use_locking, name, read_value)
        return self.assign(self.read_value() - tf.cast(delta, self.dtype))

    def scatter_add(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> TensorVariable:
        """Adds to rows."""
        return self.assign_add(self._dense(sparse_delta))

    def scatter_sub(
        self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> TensorVariable:
        """Subtracts from rows."""
        return self.assign_sub(self._dense(sparse_delta))

    def _dense(self, rows: tf.IndexedSlices) -> tf.Tensor:
        return tf.convert_to_tensor(tf.IndexedSlices(rows.values, rows.indices, tf.constant(self.shape.as_list())))

    def write(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Applies another method of `tf.Variable` that writes to the whole value."""
        if computing_on_mesh():
            return getattr(super(), method)(*arguments, **keywords)
        self._check_eager()
        value = self.read_value()
        with tf.device("CPU:0"):
            whole: Any = tf.Variable(value, trainable=False)
            getattr(whole, method)(*arguments, **keywords)
            value = whole.read_value()
        return self.assign(value)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        # `tf.train.Checkpoint` would read the variable in a function on one device.
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])

    def _check_eager(self) -> None:
        if not tf.executing_eagerly():
            raise ValueError(_IN_GRAPH)


class Meshed(Storage):
    """The storage of a variable whose value is a `MeshVariable`, which a step uses as on one device; see `Storage`."""

    variable: MeshVariable
    # `tf.where` on tensors with different layouts crashes the process.
    replaces = False

    @property
    def mesh(self) -> Mesh:
        return self.variable.mesh

    @property
    def local(self) -> MeshVariable:
        return self.variable

    def accumulate(self, gradient: GradientTensor, scale: Scalar | None, first: tf.Tensor | bool) -> None:
        # Operations on the variable's handle crash the process.
        value = tf.convert_to_tensor(gradient)
        self.variable.assign_add(value if scale is None else value * tf.cast(scale, value.dtype))

    def reset(self, first: tf.Tensor | bool) -> None:
        self.variable.assign(self.variable * tf.cast(tf.logical_not(first), self.variable.dtype))

    def parts(self, placement: ReplicaPlacement) -> Parts | None:
        # A block may span workers. So each worker writes an equal part of the flat whole, which is gathered.
        if not any(self.variable.axes):
            return None
        size = -(-math.prod(self.variable.shape) // placement.workers)

        def read() -> Iterator[np.ndarray]:
            part = np.ravel(self.variable.numpy())[placement.worker * size : (placement.worker + 1) * size]
            yield np.pad(part, (0, size - len(part)))

        return Parts(size, read)


for _method in _WRITES:
    setattr(MeshVariable, _method, functools.partialmethod(MeshVariable.write, _method))


@tf.custom_gradient
def _gather_with_gradient(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    # Like the value, the gradient is whole and on no mesh.
    return gather_dtensor(value), lambda gradient: gradient
