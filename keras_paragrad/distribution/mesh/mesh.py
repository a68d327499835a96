"""`Mesh`: how devices are arranged, and what divides batches and variables among them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from keras_paragrad.arguments import refusal, shown
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import canonical_devices
from keras_paragrad.distribution.options import Options

DISTRIBUTIONS = (keras.distribution.DataParallel, keras.distribution.ModelParallel)
BATCH_AXIS = "batch"


class Mesh(NamedTuple):
    """Devices in a grid with named axes.

    Attributes:
        shape: The size of each axis, by its name.
        devices: The names of this process's devices, in row-major order.
        batch_axis: The axis along which rows of a batch are divided, or `None` if every device computes all of them.
        distribution: Keras's distribution that says how variables are divided, or `None` if that is to be found.
        workers: How many processes have as many devices each.
        worker: The number of this one.
    """

    shape: dict[str, int]
    devices: tuple[str, ...]
    batch_axis: str | None
    distribution: Any
    workers: int = 1
    worker: int = 0

    @classmethod
    def of(cls, distribution: Any) -> "Mesh":
        """The mesh of one of Keras's distributions."""
        mesh = distribution.device_mesh
        devices = canonical_devices([str(name) for name in mesh.devices.flatten()])
        shape = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))
        if distribution.batch_dim_name not in shape:
            raise ValueError(
                f"batch_dim_name={distribution.batch_dim_name!r} is not an axis of the mesh, which has {shown(shape)}. "
                f"Write batch_dim_name={next(iter(shape))!r}, say."
            )
        return cls(shape, devices, distribution.batch_dim_name, distribution)

    @property
    def words(self) -> str:
        """Its axes, such as `batch 2 x model 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.shape.items())

    def device_mesh(self) -> Any:
        """Keras's `DeviceMesh` of it."""
        names = [name.lower() for name in self.devices]
        if self.workers > 1:
            kind = names[0].partition(":")[0]
            names = [f"{kind}:{index}" for index in range(self.workers * len(names))]
        return keras.distribution.DeviceMesh(tuple(self.shape.values()), list(self.shape), names)


def check_mesh(found: Any) -> dict[str, int] | None:
    """The argument `mesh`, or `None` if it isn't given."""
    if found is None:
        return None
    pairs = dict(found) if isinstance(found, Mapping) else {}
    good = all(isinstance(name, str) and name for name in pairs)
    good = good and all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in pairs.values())
    if not pairs or not good or not set(pairs) <= {BATCH_AXIS, "model"}:
        expected = (
            "the sizes of the axes 'batch' and 'model'; for others write strategy=keras.distribution.ModelParallel"
        )
        raise refusal("mesh", found, expected, '{"batch": 2, "model": 2}')
    return pairs


def planned_mesh(options: Options, hardware: Hardware) -> Mesh:
    """The mesh that options ask for: on its distribution's devices, or on named devices, the GPUs, or CPU devices."""
    workers, cluster = hardware.worker_count, hardware.cluster
    place = workers, cluster.rank if cluster is not None and workers > 1 else 0
    if options.mesh is not None:
        axis = BATCH_AXIS if BATCH_AXIS in options.mesh else None
        mesh = Mesh(dict(options.mesh), _places(options.mesh, options.devices, hardware), axis, None, *place)
    else:
        whole = Mesh.of(options.strategy)
        devices = _of_each_worker(whole, workers) if workers > 1 else whole.devices
        mesh = Mesh(whole.shape, devices, whole.batch_axis, whole.distribution, *place)
    check_here(mesh, hardware)
    return mesh


def _places(shape: Mapping[str, int], named: Sequence[str] | None, hardware: Hardware) -> tuple[str, ...]:
    workers = hardware.worker_count
    found = list(named) if named else [each.name for each in hardware.of_kind("GPU") or hardware.of_kind("CPU")]
    count, rest = divmod(math.prod(shape.values()), workers)
    # Of the devices that are there by themselves, some may be left over.
    if rest or len(found) < count or (named and len(found) != count):
        raise ValueError(_mismatch(shape, found, workers))
    return tuple(found[:count])


def _of_each_worker(mesh: Mesh, workers: int) -> tuple[str, ...]:
    """A worker's devices, where a distribution counts those of all workers, as Keras does."""
    kind, count = mesh.devices[0].partition(":")[0], len(mesh.devices)
    fits = max(count // workers, 1) * workers
    if count % workers or mesh.devices != tuple(f"{kind}:{index}" for index in range(count)):
        raise ValueError(
            f"The mesh {mesh.words} has the devices {', '.join(mesh.devices)}. On {workers} workers, with equally many "
            f"devices each, they are counted over all of them: {kind}:0 to {kind}:{fits - 1}, say."
        )
    return mesh.devices[: count // workers]


def check_here(mesh: Mesh, hardware: Hardware) -> None:
    """Refuses a mesh of devices that this process doesn't have, or that workers can't share."""
    cluster, instead = hardware.cluster, 'strategy="multi_worker" with shard="parameters"'
    if cluster is not None and hardware.worker_count > 1:
        if set(cluster.jobs) != {"worker"}:
            raise ValueError(
                f"A mesh of several processes consists of workers, and the cluster has the jobs {shown(cluster.jobs)}. "
                f"Start it with `keras-paragrad launch --workers {hardware.worker_count}`, or write {instead}."
            )
        if not all(name.startswith("CPU") for name in mesh.devices):
            raise ValueError(
                f"On several workers a mesh is of CPU devices, and this one has {', '.join(mesh.devices)} on each: on "
                f"GPUs TensorFlow needs what only a process that is alone can set up. Write {instead}."
            )
    here = [device.name for device in hardware.devices]
    missing = [name for name in mesh.devices if name not in here]
    if missing:
        raise ValueError(
            f"The mesh {mesh.words} has the devices {', '.join(missing)}, but TensorFlow has {', '.join(here)}. "
            f"{_split(len(mesh.devices))}"
        )


def _mismatch(shape: Mapping[str, int], found: list[str], workers: int) -> str:
    places, each = math.prod(shape.values()), f" on each of {workers} workers" if workers > 1 else ""
    fits = places // workers or 1
    return (
        f"mesh={shape} has {places} places, and there are {len(found)} devices{each}: {', '.join(found)}. Write a mesh "
        f"of {len(found) * workers}, or name {fits} devices{each}. {_split(fits)}"
    )


def _split(count: int) -> str:
    return (
        "To split the CPU into logical devices, run this first: tf.config.set_logical_device_configuration("
        f'tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * {count}).'
    )
