"""Wraps DTensor for all other modules: tensors, variables and functions on a mesh of devices."""

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor  # pyright: ignore[reportMissingModuleSource]

from keras_paragrad.compat.private import api
from keras_paragrad.compat.types import Array

# With this pass, the all-reduces of a step on a mesh that divides the batch give wrong sums, without an error.
COMBINE_PASS = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"

# The stubs of DTensor lack methods.
Mesh: TypeAlias = dtensor.Mesh | Any
Layout: TypeAlias = dtensor.Layout | Any
# For each dimension of a tensor, the name of the mesh axis along which it is divided, or `None`.
Axes = tuple[str | None, ...]


class _MeshContext(threading.local):
    """The mesh that this thread computes on.

    Attributes:
        mesh: The mesh, if any.
        assigned: The values of discarded assignments, by the `id` of the variable, so that the step can read them;
            `None` if assignments are carried out.
    """

    mesh: Mesh | None = None
    assigned: dict[int, Any] | None = None


CONTEXT = _MeshContext()


def turn_combine_pass_off() -> None:
    """Keeps TensorFlow from combining the all-reduces of a step, or refuses an environment in which it may."""
    if COMBINE_PASS not in os.environ and api._dtensor_singleton is not None:
        raise ValueError(
            f"This process has computed on a mesh before, without {COMBINE_PASS}=0 in the environment. TensorFlow may "
            "go on to add up gradients wrong, without an error. Start Python with it, or make DistributedFit first."
        )
    if os.environ.setdefault(COMBINE_PASS, "0") != "0":
        raise ValueError(
            f"{COMBINE_PASS}={os.environ[COMBINE_PASS]} is in the environment. With it TensorFlow adds up the "
            f"gradients of a mesh wrong, without an error. Start Python with {COMBINE_PASS}=0."
        )


def span_workers(workers: Sequence[str], worker: int) -> None:
    """Lets meshes of this process span workers at some addresses, by environment variables, before one is made."""
    os.environ |= {"DTENSOR_JOB_NAME": "worker", "DTENSOR_JOBS": ",".join(workers)}
    os.environ |= {"DTENSOR_CLIENT_ID": str(worker), "DTENSOR_NUM_CLIENTS": str(len(workers))}


def make_mesh(shape: Mapping[str, int], devices: Sequence[str], workers: int = 1, worker: int = 0) -> Mesh:
    """Makes a mesh of this process's devices, or of all workers' devices.

    `shape` has the size of each axis, and `devices` this process's, such as `"CPU:0"`, in row-major order; each worker
    has the same number.
    """
    if workers == 1:
        return dtensor.create_mesh(list(shape.items()), devices=list(devices))
    names = [f"/job:worker/replica:0/task:{task}/device:{name}" for task in range(workers) for name in devices]
    local = list(range(worker * len(devices), (worker + 1) * len(devices)))
    ids, make = np.arange(len(names)).reshape(list(shape.values())), cast("Any", dtensor.Mesh)
    return make(list(shape), ids, local, [names[index] for index in local], global_devices=names)


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Generator[None]:
    """Context in which functions run on a mesh, and its variables are read and assigned as DTensors."""
    before, error = CONTEXT.mesh, None
    with dtensor.default_mesh(mesh):
        CONTEXT.mesh = mesh
        try:
            yield
        except BaseException as raised:
            # Raised after the mesh is left: `default_mesh` doesn't undo itself when an error passes through it.
            error = raised
        finally:
            CONTEXT.mesh = before
    if error is not None:
        raise error


@contextlib.contextmanager
def discard_assignments() -> Generator[None]:
    """Context in which a step on a mesh reads back its own assignments, while the variables keep their values."""
    CONTEXT.assigned = {}
    try:
        yield
    finally:
        CONTEXT.assigned = None


def computing_on_mesh() -> bool:
    """Whether this thread computes on a mesh."""
    return CONTEXT.mesh is not None


def layout_of(mesh: Mesh, axes: Axes) -> Layout:
    """The DTensor layout of a tensor that is divided along axes of a mesh."""
    make: Any = dtensor.Layout
    return make([axis or dtensor.UNSHARDED for axis in axes], mesh)


def axis_size(mesh: Mesh, axis: str) -> int:
    """The number of devices along an axis of a mesh."""
    return cast("Any", mesh).dim_size(axis)


def distribute(value: Array, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Makes a DTensor of a whole value, and sends each part only to its own devices.

    Divided dimensions are multiples of the size of their axis.
    """
    layout = layout_of(mesh, axes)
    whole: Any = tf.convert_to_tensor(value)
    sizes = [size // axis_size(mesh, axis) if axis else size for size, axis in zip(whole.shape, axes, strict=True)]
    positions = _local_positions(layout)
    begins = {position: [i * size for i, size in zip(position, sizes, strict=True)] for position in set(positions)}
    parts = {each: tf.slice(whole, begin, sizes) if sizes else whole for each, begin in begins.items()}
    return dtensor.pack([parts[position] for position in positions], layout)


def _local_positions(layout: Layout) -> list[tuple[int, ...]]:
    """For each of this process's devices, the position of its part in the tensor."""
    positions = [tuple(position) for position in layout.offset_to_shard()]
    return [positions[index] for index in layout.mesh.local_device_ids()]


def _is_whole_on_each_worker(layout: Layout) -> bool:
    """Whether the devices of each worker together have all parts of a tensor."""
    positions, local = [tuple(position) for position in layout.offset_to_shard()], len(layout.mesh.local_device_ids())
    return all(set(positions[i : i + local]) == set(positions) for i in range(0, len(positions), local))


def gather_dtensor(tensor: Any) -> tf.Tensor:
    """Gathers a DTensor into host memory; returns other tensors unchanged. Called on every worker."""
    if not dtensor.is_dtensor(tensor):
        return tensor
    layout = dtensor.fetch_layout(tensor)
    if not _is_whole_on_each_worker(layout):
        with on_mesh(layout.mesh):
            tensor = dtensor.relayout(tensor, layout_of(layout.mesh, (None,) * len(tensor.shape)))
        layout = dtensor.fetch_layout(tensor)
    # The parts are on single devices, and have to leave the mesh's device.
    parts = dict(zip(_local_positions(layout), dtensor.unpack(tensor), strict=True))
    if len(parts) == 1:
        with tf.device("CPU:0"):
            return tf.identity(next(iter(parts.values())))
    whole = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype)
    for position, part in parts.items():
        block = tuple(slice(i * size, (i + 1) * size) for i, size in zip(position, part.shape, strict=True))
        whole[block] = part.numpy()
    with tf.device("CPU:0"):
        return tf.constant(whole)


def relayout(tensor: tf.Tensor, axes: Axes, gradient: Axes | None = None) -> tf.Tensor:
    """`dtensor.relayout` on the mesh of the step that is being traced; the gradient has `axes` too, unless stated."""
    layout = layout_of(CONTEXT.mesh, axes)
    if not tensor.dtype.is_floating:
        return dtensor.relayout(tensor, layout)

    @tf.custom_gradient
    def forward(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return dtensor.relayout(tensor, layout), backward

    def backward(cotangent: tf.Tensor) -> tf.Tensor:
        # DTensor's own gradient restores the layout of the input, which is not always known in a trace. DTensor also
        # lacks rules for some divided gradients, so gradients are divided last.
        cotangent = dtensor.relayout(cotangent, layout)
        return cotangent if gradient is None else dtensor.relayout(cotangent, layout_of(CONTEXT.mesh, gradient))

    moved: Any = forward(tensor)
    return moved


def bytes_by_device(storage: Any) -> dict[str, int]:
    """The bytes of a variable on a mesh by device, counted in the devices' buffers."""
    total: dict[str, int] = {}
    with on_mesh(storage.mesh):
        parts = dtensor.unpack(storage.divided_value())
    for part in parts:
        spec: Any = tf.DeviceSpec.from_string(part.backing_device)
        name = f"{spec.device_type}:{spec.device_index}"
        total[name] = total.get(name, 0) + int(np.prod(part.shape)) * part.dtype.size
    return total


def make_variable(value: Array, *, mesh: Mesh, axes: Axes, name: str, trainable: bool) -> tf.Variable:
    """Makes a `DVariable` of a value, an array or a tensor, divided along axes of a mesh."""
    return dtensor.DVariable(distribute(value, mesh, axes), name=name, trainable=trainable)
