"""`MeshVariable`: the value of a Keras variable that is divided over a mesh, and `Meshed`, its storage."""

import contextlib
import functools
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from keras_paragrad.compat.local import Place
from keras_paragrad.storage.dtensor import (
    INSIDE,
    Axes,
    computing_on_mesh,
    divided,
    gathered,
    make_variable,
    on_mesh,
    relayout,
)
from keras_paragrad.storage.outside import WRITES, written_whole
from keras_paragrad.storage.storage import Parts, Whole


# Not a `ResourceVariable`, as DTensor's are: TensorFlow's operations read those themselves, without asking.
class MeshVariable(BaseResourceVariable):
    """A variable that is divided over a mesh.

    In a step on the mesh it is DTensor's. Anywhere else it is whole: gathered where it is read, with the gradient of
    the whole, and divided where it is assigned.

    Args:
        value: The whole.
        mesh: The mesh.
        axes: What each dimension is divided along.
        name: As in `tf.Variable`.
        trainable: As in `tf.Variable`.

    Attributes:
        whole_in_steps: Whether a step, too, reads it whole on each device. Its gradient is divided again.
    """

    def __init__(self, *, value: Any, mesh: Any, axes: Axes, name: str, trainable: bool):
        # It owns what the handle is of.
        self._held = held = make_variable(value, mesh=mesh, axes=axes, name=name, trainable=trainable)
        super().__init__(
            trainable=trainable,
            shape=held.shape,
            dtype=held.dtype,
            handle=held.handle,
            name=name,
            unique_id=f"{name}_{uuid.uuid4().hex}",
            handle_name=name,
            in_graph_mode=False,
        )
        self.mesh, self.axes = mesh, axes
        self.whole_in_steps = False

    @property
    def storage(self) -> "Meshed":
        """What is asked where a variable's value lives."""
        return Meshed(self)

    def divided_value(self) -> Any:
        """Its value as DTensor has it."""
        return super()._read_variable_op()

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if computing_on_mesh():
            if INSIDE.assigned is not None and id(self) in INSIDE.assigned:
                return INSIDE.assigned[id(self)]
            value = super()._read_variable_op(no_copy)
            whole = (None,) * len(self.axes)
            return relayout(value, whole, self.axes) if self.whole_in_steps and any(self.axes) else value
        if in_symbolic_scope():
            return tf.zeros(self.shape, self.dtype)
        self._check_eager()
        with on_mesh(self.mesh):
            value = super()._read_variable_op(no_copy)
        found: Any = _gathered_with_gradient(value)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """Rows of it."""
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """Slices of it."""
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Assigns the whole, or in a step what DTensor has of it."""
        if computing_on_mesh():
            if INSIDE.assigned is not None:
                return self._noted(tf.cast(value, self.dtype))
            return super().assign(value, use_locking, name, read_value)
        self._check_eager()
        parts = divided(tf.cast(tf.convert_to_tensor(value), self.dtype), self.mesh, self.axes)
        with on_mesh(self.mesh):
            super().assign(parts, read_value=False)
        return self

    def assign_add(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Adds the whole, or in a step what DTensor has of it."""
        if computing_on_mesh():
            if INSIDE.assigned is not None:
                return self._noted(self._read_variable_op() + tf.cast(delta, self.dtype))
            return super().assign_add(delta, use_locking, name, read_value)
        return self.assign(self.read_value() + tf.cast(delta, self.dtype))

    def assign_sub(self, delta: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Subtracts the whole, or in a step what DTensor has of it."""
        if computing_on_mesh():
            if INSIDE.assigned is not None:
                return self._noted(self._read_variable_op() - tf.cast(delta, self.dtype))
            return super().assign_sub(delta, use_locking, name, read_value)
        return self.assign(self.read_value() - tf.cast(delta, self.dtype))

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Adds to rows of it."""
        return self.assign_add(self._with_shape(sparse_delta))

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: str | None = None) -> Any:
        """Subtracts from rows of it."""
        return self.assign_sub(self._with_shape(sparse_delta))

    def _with_shape(self, rows: Any) -> Any:
        return tf.convert_to_tensor(tf.IndexedSlices(rows.values, rows.indices, tf.constant(self.shape)))

    def write(self, method: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What else `tf.Variable` can write, done to the whole."""
        if computing_on_mesh():
            return getattr(super(), method)(*arguments, **keywords)
        self._check_eager()
        return self.assign(written_whole(self.read_value(), method, *arguments, **keywords))

    def _noted(self, value: Any) -> Any:
        assert INSIDE.assigned is not None
        INSIDE.assigned[id(self)] = value
        return value

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        # For `tf.train.Checkpoint`, which would read it in a function of one device.
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])

    def _check_eager(self) -> None:
        if not tf.executing_eagerly():
            raise ValueError(_IN_GRAPH)


class Meshed(Whole):
    """The storage of a variable whose value is a `MeshVariable`: in a step it is as one device's."""

    # Choosing between tensors that are divided in ways of their own ends the process.
    replaces = False

    @property
    def mesh(self) -> Any:
        return self.variable.mesh

    @property
    def local(self) -> Any:
        return self.variable

    def accumulate(self, gradient: Any, scale: Any, first: Any) -> None:
        # Operations on the variable's handle end the process there.
        value = tf.convert_to_tensor(gradient)
        self.variable.assign_add(value if scale is None else value * tf.cast(scale, value.dtype))

    def reset(self, first: Any) -> None:
        self.variable.assign(self.variable * tf.cast(tf.logical_not(first), self.variable.dtype))

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return on_mesh(self.mesh)

    def parts(self, place: Place) -> Parts | None:
        # Blocks may be on several workers. So each writes as much of the flat whole, gathered one variable at a time.
        if not any(self.variable.axes):
            return None
        size = -(-math.prod(self.variable.shape) // place.workers)

        def read() -> Iterator[np.ndarray]:
            mine = np.ravel(self.variable.numpy())[place.worker * size : (place.worker + 1) * size]
            yield np.pad(mine, (0, size - len(mine)))

        return Parts(size, read)


for _method in WRITES:
    setattr(MeshVariable, _method, functools.partialmethod(MeshVariable.write, _method))


@tf.custom_gradient
def _gathered_with_gradient(value: Any) -> Any:
    # The gradient of the variable is that of the whole, on no mesh either.
    return gathered(value), lambda gradient: gradient


_IN_GRAPH = (
    "The model's variables are on a mesh of devices, and a function of one device reads or assigns them. Call undo() "
    "of the handle that dist.prepare(model) returned, which puts them back on one device. To export the model, load "
    "its weights into one that was built without DistributedFit."
)
