"""`Mesh`: devices in a grid, whose axes divide batches and variables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras

from keras_paragrad.arguments import quote, refusal
from keras_paragrad.distribution.decisions import splitting_cpu
from keras_paragrad.distribution.hardware import Hardware, canonical_devices, kind_of_device
from keras_paragrad.distribution.options import Options
from keras_paragrad.plain_text import counted

DISTRIBUTIONS = (keras.distribution.DataParallel, keras.distribution.ModelParallel)
BATCH_AXIS = "batch"


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid with named axes.

    Attributes:
        shape: The size of each axis, by its name.
        devices: The names of this process's devices, in row-major order.
        batch_axis: The axis that divides the rows of a batch, or `None` if every device computes all rows.
        distribution: The Keras distribution that divides variables, or `None` for an automatic layout.
        workers: The number of processes, each with the same number of devices.
        worker: The number of this process.
    """

    shape: dict[str, int]
    devices: tuple[str, ...]
    batch_axis: str | None
    distribution: keras.distribution.DataParallel | keras.distribution.ModelParallel
    workers: int = 1
    worker: int = 0

    @classmethod
    def of(cls, distribution: keras.distribution.DataParallel | keras.distribution.ModelParallel) -> "Mesh":
        """The mesh of a Keras distribution."""
        mesh = distribution.device_mesh
        devices = canonical_devices([str(name) for name in mesh.devices.flatten()])
        shape = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))
        if distribution.batch_dim_name not in shape:
            raise ValueError(
                f"batch_dim_name={distribution.batch_dim_name!r} is not an axis of the mesh, which has {quote(shape)}. "
                f"Write batch_dim_name={next(iter(shape))!r}, say."
            )
        return cls(shape, devices, distribution.batch_dim_name, distribution)

    @property
    def in_words(self) -> str:
        """Its axes, such as `batch 2 x model 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.shape.items())

    def device_mesh(self) -> keras.distribution.DeviceMesh:
        """The mesh as Keras's `DeviceMesh`, over all workers."""
        names = [name.lower() for name in self.devices]
        if self.workers > 1:
            kind = names[0].partition(":")[0]
            names = [f"{kind}:{index}" for index in range(self.workers * len(names))]
        return keras.distribution.DeviceMesh(tuple(self.shape.values()), list(self.shape), names)


def check_mesh(mesh: object) -> dict[str, int] | None:
    """The argument `mesh`, checked."""
    if mesh is None:
        return None
    sizes = dict(mesh) if isinstance(mesh, Mapping) else {}
    integers = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes.values())
    if not sizes or not integers or not sizes.keys() <= {BATCH_AXIS, "model"}:
        expected = (
            "the sizes of the axes 'batch' and 'model'; for others write strategy=keras.distribution.ModelParallel"
        )
        raise refusal("mesh", mesh, expected, '{"batch": 2, "model": 2}')
    return sizes


def planned_mesh(options: Options, hardware: Hardware) -> Mesh:
    """The mesh that the options describe: on its distribution's devices, or on named ones, the GPUs or the CPUs."""
    workers, cluster = hardware.worker_count, hardware.cluster
    worker = cluster.rank if cluster is not None and workers > 1 else 0
    if options.mesh is not None:
        axis = BATCH_AXIS if BATCH_AXIS in options.mesh else None
        devices = _choose_devices(options.mesh, options.devices, hardware)
        mesh = Mesh(dict(options.mesh), devices, axis, None, workers, worker)
    else:
        mesh = Mesh.of(options.strategy)
        devices = _devices_of_worker(mesh, workers) if workers > 1 else mesh.devices
        mesh = dataclasses.replace(mesh, devices=devices, workers=workers, worker=worker)
    _check_available(mesh, hardware)
    return mesh


def _choose_devices(shape: Mapping[str, int], named: Sequence[str] | None, hardware: Hardware) -> tuple[str, ...]:
    """The devices for the places of a mesh: the named ones, or the worker's first ones."""
    workers, places = hardware.worker_count, math.prod(shape.values())
    devices = hardware.of_kind("GPU") or hardware.of_kind("CPU")
    names = list(named) if named else [device.name for device in devices]
    count, rest = divmod(places, workers)
    # All devices that are named have to be used; of the others, some may be left over.
    if rest or len(names) < count or (named and len(names) != count):
        where, count = f" on each of {workers} workers" if workers > 1 else "", count or 1
        raise ValueError(
            f"mesh={shape} has {counted(places, 'place')} for {counted(len(names), 'device')}{where}: "
            f"{', '.join(names)}. Write a mesh of {len(names) * workers}, or name {counted(count, 'device')}{where}. "
            f"{splitting_cpu(count)}"
        )
    return tuple(names[:count])


def _devices_of_worker(mesh: Mesh, workers: int) -> tuple[str, ...]:
    """A worker's devices; a distribution names all workers' devices, as Keras does."""
    kind, count = kind_of_device(mesh.devices[0]), len(mesh.devices)
    fits = max(count // workers, 1) * workers
    if count % workers or mesh.devices != tuple(f"{kind}:{index}" for index in range(count)):
        raise ValueError(
            f"The mesh {mesh.in_words} has the devices {', '.join(mesh.devices)}. On {workers} workers, with the "
            f"same number of devices each, they are counted over all of them: {kind}:0 to {kind}:{fits - 1}, say."
        )
    return mesh.devices[: count // workers]


def _check_available(mesh: Mesh, hardware: Hardware) -> None:
    """Refuses a mesh whose devices this process doesn't have, or that can't span the workers of the cluster."""
    cluster, instead = hardware.cluster, 'strategy="multi_worker" with shard="parameters"'
    if cluster is not None and hardware.worker_count > 1:
        if set(cluster.jobs) != {"worker"}:
            raise ValueError(
                "A mesh over several processes needs a cluster of workers only, and has the jobs "
                f"{quote(cluster.jobs)}. Start it with `keras-paragrad launch --workers {hardware.worker_count}`, or "
                f"write {instead}."
            )
        if not all(name.startswith("CPU") for name in mesh.devices):
            raise ValueError(
                f"A mesh over several workers can only have CPU devices, and has {', '.join(mesh.devices)} on each: "
                f"TensorFlow sets up GPUs for a mesh in a single process only. Write {instead}."
            )
    available = [device.name for device in hardware.devices]
    missing = [name for name in mesh.devices if name not in available]
    if missing:
        raise ValueError(
            f"The mesh {mesh.in_words} has the devices {', '.join(missing)}, but TensorFlow has {', '.join(available)}."
            f" {splitting_cpu(len(mesh.devices))}"
        )
