"""The one place that knows DTensor: tensors, variables and functions on a mesh of devices."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf
from tensorflow.dtensor.python import api
from tensorflow.experimental import dtensor  # pyright: ignore[reportMissingModuleSource]

# With that pass, several all-reduces of a step on a mesh that divides the batch are added up wrong, without a word.
COMBINE_PASS = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"

# What a dimension of a tensor is divided along: the name of a mesh's axis, or `None`.
Axes = tuple[str | None, ...]


class _Inside(threading.local):
    """What this thread computes on.

    Attributes:
        mesh: The mesh, if any.
        assigned: By the `id`s of variables, what was assigned and is to be discarded; `None` if assignments count.
    """

    mesh: Any = None
    assigned: dict[int, Any] | None = None


INSIDE = _Inside()


def turn_combine_pass_off() -> None:
    """Has TensorFlow leave the all-reduces of a step apart.

    Raises:
        ValueError: The environment says otherwise, or TensorFlow may have read it.
    """
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


def join(workers: Sequence[str], worker: int) -> None:
    """Has meshes of this process span several, which have joined a cluster.

    Args:
        workers: Their addresses.
        worker: The number of this one.
    """
    os.environ |= {"DTENSOR_JOB_NAME": "worker", "DTENSOR_JOBS": ",".join(workers)}
    os.environ |= {"DTENSOR_CLIENT_ID": str(worker), "DTENSOR_NUM_CLIENTS": str(len(workers))}


def make_mesh(shape: Mapping[str, int], devices: Sequence[str], workers: int = 1, worker: int = 0) -> Any:
    """A mesh of this process's devices, or of those of several workers.

    Args:
        shape: The size of each axis, by its name.
        devices: The names of this process's devices, in row-major order, such as `"CPU:0"`; each worker has as many.
        workers: How many workers there are.
        worker: The number of this one.
    """
    if workers == 1:
        return dtensor.create_mesh(list(shape.items()), devices=list(devices))
    names = [f"/job:worker/replica:0/task:{task}/device:{name}" for task in range(workers) for name in devices]
    here = range(worker * len(devices), (worker + 1) * len(devices))
    places, make = np.arange(len(names)).reshape(list(shape.values())), cast("Any", dtensor.Mesh)
    return make(list(shape), places, list(here), [names[place] for place in here], global_devices=names)


@contextlib.contextmanager
def on_mesh(mesh: Any) -> Iterator[None]:
    """Context in which functions run on a mesh, and variables on it are read and assigned as its tensors."""
    before, error = INSIDE.mesh, None
    with dtensor.default_mesh(mesh):
        INSIDE.mesh = mesh
        try:
            yield
        except BaseException as raised:
            # It has to be kept back until the mesh is left: DTensor doesn't undo a scope that ends with an error.
            error = raised
        finally:
            INSIDE.mesh = before
    if error is not None:
        raise error


@contextlib.contextmanager
def assignments_discarded() -> Iterator[None]:
    """Context in which what a step on a mesh assigns to variables is read from them, and then forgotten."""
    INSIDE.assigned = {}
    try:
        yield
    finally:
        INSIDE.assigned = None


def computing_on_mesh() -> bool:
    """Whether this thread computes on a mesh."""
    return INSIDE.mesh is not None


def layout_of(mesh: Any, axes: Axes) -> Any:
    """DTensor's layout of a tensor that is divided along axes of a mesh."""
    make: Any = dtensor.Layout
    return make([axis or dtensor.UNSHARDED for axis in axes], mesh)


def axes_of(tensor: Any) -> Axes:
    """What each dimension of a tensor on a mesh is divided along."""
    specs = dtensor.fetch_layout(tensor).sharding_specs
    return tuple(None if spec == dtensor.UNSHARDED else spec for spec in specs)


def divided(value: Any, mesh: Any, axes: Axes) -> Any:
    """A tensor on a mesh, of which each device is sent its part alone.

    Args:
        value: The whole, an array or a tensor.
        mesh: The mesh.
        axes: What it is divided along. Divided dimensions are multiples of their axes' sizes.
    """
    layout = layout_of(mesh, axes)
    whole: Any = tf.convert_to_tensor(value)
    sizes = [size // mesh.dim_size(axis) if axis else size for size, axis in zip(whole.shape, axes, strict=True)]
    places = _places_here(layout)
    parts = {place: _part(whole, place, sizes) for place in set(places)}
    return dtensor.pack([parts[place] for place in places], layout)


def _places_here(layout: Any) -> list[tuple[int, ...]]:
    """For each of this process's devices, which part of a tensor it has."""
    places = [tuple(place) for place in layout.offset_to_shard()]
    return [places[index] for index in layout.mesh.local_device_ids()]


def _is_whole_on_each_worker(layout: Any) -> bool:
    places, local = [tuple(place) for place in layout.offset_to_shard()], len(layout.mesh.local_device_ids())
    return all(set(places[first : first + local]) == set(places) for first in range(0, len(places), local))


def _part(whole: Any, place: Sequence[int], sizes: Sequence[int]) -> Any:
    return tf.slice(whole, [index * size for index, size in zip(place, sizes, strict=True)], sizes) if sizes else whole


def gathered(tensor: Any) -> tf.Tensor:
    """The whole of a tensor on a mesh, in the host's memory; one that is on no mesh is returned as it is.

    Every worker of the mesh calls this.
    """
    if not dtensor.is_dtensor(tensor):
        return tensor
    layout = dtensor.fetch_layout(tensor)
    if not _is_whole_on_each_worker(layout):
        with on_mesh(layout.mesh):
            tensor = dtensor.relayout(tensor, layout_of(layout.mesh, (None,) * len(tensor.shape)))
        layout = dtensor.fetch_layout(tensor)
    # As pieces of one device each, they may no longer be on the mesh's device.
    parts = dict(zip(_places_here(layout), dtensor.unpack(tensor), strict=True))
    if len(parts) == 1:
        with tf.device("CPU:0"):
            return tf.identity(next(iter(parts.values())))
    whole = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype)
    for place, part in parts.items():
        whole[tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, part.shape, strict=True))] = part.numpy()
    with tf.device("CPU:0"):
        return tf.constant(whole)


def relayout(tensor: Any, axes: Axes, gradient: Axes | None = None) -> Any:
    """A tensor on the mesh of the step that is being traced, divided along other axes.

    Args:
        tensor: The tensor.
        axes: What its dimensions are to be divided along.
        gradient: The same of its gradient; as the tensor, if `None`.
    """
    layout = layout_of(INSIDE.mesh, axes)
    if not tensor.dtype.is_floating:
        return dtensor.relayout(tensor, layout)

    @tf.custom_gradient
    def laid_out(tensor: Any) -> Any:
        return dtensor.relayout(tensor, layout), back

    def back(cotangent: Any) -> Any:
        # DTensor's own gradient is divided as the tensor was, which it does not always know. Nor has it a rule for
        # every operation that is to give a gradient in parts: it gives the whole, which is then divided.
        cotangent = dtensor.relayout(cotangent, layout)
        return cotangent if gradient is None else dtensor.relayout(cotangent, layout_of(INSIDE.mesh, gradient))

    return laid_out(tensor)


def bytes_by_device(storage: Any) -> dict[str, int]:
    """The bytes of a variable on a mesh that each device holds, counted in the devices' own buffers."""
    held: dict[str, int] = {}
    with on_mesh(storage.mesh):
        parts = dtensor.unpack(storage.divided_value())
    for part in parts:
        spec: Any = tf.DeviceSpec.from_string(part.backing_device)
        name = f"{spec.device_type}:{spec.device_index}"
        held[name] = held.get(name, 0) + int(np.prod(part.shape)) * part.dtype.size
    return held


def make_variable(value: Any, *, mesh: Any, axes: Axes, name: str, trainable: bool) -> Any:
    """DTensor's variable of a value, an array or a tensor, that is divided along axes of a mesh."""
    return dtensor.DVariable(divided(value, mesh, axes), name=name, trainable=trainable)
