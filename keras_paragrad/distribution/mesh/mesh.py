"""`Mesh`: how devices are arranged, and what divides batches and variables among them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras

from keras_paragrad.arguments import refusal, shown
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.names import canonical_devices

DISTRIBUTIONS = (keras.distribution.DataParallel, keras.distribution.ModelParallel)
BATCH_AXIS = "batch"


class Mesh(NamedTuple):
    """Devices in a grid with named axes.

    Attributes:
        shape: The size of each axis, by its name.
        devices: The devices' names, in row-major order.
        batch_axis: The axis along which rows of a batch are divided, or `None` if every device computes all of them.
        distribution: Keras's distribution that says how variables are divided, or `None` if that is to be found.
    """

    shape: dict[str, int]
    devices: tuple[str, ...]
    batch_axis: str | None
    distribution: Any

    @classmethod
    def of(cls, distribution: Any) -> "Mesh":
        """The mesh of one of Keras's distributions.

        Raises:
            ValueError: Its devices have no names that TensorFlow knows.
        """
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
        return keras.distribution.DeviceMesh(
            tuple(self.shape.values()), list(self.shape), [name.lower() for name in self.devices]
        )


def check_mesh(found: Any) -> dict[str, int] | None:
    """The argument `mesh`, or `None` if it isn't given.

    Raises:
        ValueError: It is no mapping from names of axes to their sizes.
    """
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


def mesh_on(shape: dict[str, int], devices: Sequence[str] | None, hardware: Hardware) -> Mesh:
    """A mesh on named devices, or on the GPUs, or else on logical devices of the CPU.

    Raises:
        ValueError: There are more or fewer devices than places.
    """
    found = list(devices) if devices else [each.name for each in hardware.of_kind("GPU") or hardware.of_kind("CPU")]
    places = math.prod(shape.values())
    # Of the devices that are there by themselves, some may be left over.
    if len(found) < places or (devices and len(found) != places):
        raise ValueError(_mismatch(shape, found, places))
    return Mesh(shape, tuple(found[:places]), BATCH_AXIS if BATCH_AXIS in shape else None, None)


def planned_mesh(options: Any, hardware: Hardware) -> Mesh:
    """The mesh that options ask for.

    Raises:
        ValueError: The hardware doesn't have it.
    """
    given = options.distribution
    mesh = Mesh.of(given) if given is not None else mesh_on(options.mesh, options.devices, hardware)
    check_here(mesh, hardware)
    return mesh


def check_here(mesh: Mesh, hardware: Hardware) -> None:
    """Refuses a mesh of devices that this process doesn't have, or that is to span several processes.

    Raises:
        ValueError: The message says what to write.
    """
    if hardware.worker_count > 1:
        raise ValueError(
            f"A mesh works within one process, and this one is of a cluster of {hardware.worker_count} workers. "
            'Start it alone, or write strategy="multi_worker" with shard="parameters".'
        )
    here = [device.name for device in hardware.devices]
    missing = [name for name in mesh.devices if name not in here]
    if missing:
        raise ValueError(
            f"The mesh {mesh.words} has the devices {', '.join(missing)}, but TensorFlow has {', '.join(here)}. "
            f"{_split(len(mesh.devices))}"
        )


def _mismatch(shape: dict[str, int], found: list[str], places: int) -> str:
    return (
        f"mesh={shape} has {places} places, and there are {len(found)} devices: {', '.join(found)}. Write a mesh of "
        f"{len(found)}, or name {places} devices. {_split(places)}"
    )


def _split(count: int) -> str:
    return (
        "To split the CPU into logical devices, run this first: tf.config.set_logical_device_configuration("
        f'tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * {count}).'
    )
