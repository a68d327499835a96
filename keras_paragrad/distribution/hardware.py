"""The hardware to train on, processors, accelerators, memory, and the cluster."""

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from keras_paragrad.arguments import check_each, quote, refusal
from keras_paragrad.distribution.cluster import Cluster, find_cluster

KINDS = ("CPU", "GPU")
_SMI_SECONDS = 10
_DEVICE_NAME = re.compile(r"(?:/?device:|/)?(CPU|GPU):([0-9]{1,9})", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """A device that a replica can run on.

    Attributes:
        name: As in TensorFlow and `DistributedFit(devices=...)`: `GPU:0`.
        kind: `CPU` or `GPU`.
        memory_bytes: Its memory, in bytes, or `None` if unknown. Logical CPU devices share the machine's.
        compute_capability: Of an NVIDIA GPU, such as `(8, 0)`.
        description: The vendor's name of the model.
    """

    name: str
    kind: str
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    description: str = ""


@dataclass(frozen=True)
class Hardware:
    """The hardware to train on, as `detect` finds it.

    Attributes:
        cpu_count: Number of processors that this process may use.
        memory_bytes: The machine's memory, in bytes, or `None` if unknown.
        devices: The logical devices of all kinds.
        gpus: The physical GPUs, which may be divided into several logical devices.
        cluster: The processes that train together, or `None`.

    Example:

    >>> from keras_paragrad.distribution.hardware import Device, Hardware
    >>> gpus = tuple(Device(f"GPU:{index}", "GPU", 80 * 2**30, (9, 0), "H100") for index in range(2))
    >>> machine = Hardware(64, 512 * 2**30, (Device("CPU:0", "CPU"), *gpus), gpus)
    >>> [device.name for device in machine.of_kind("GPU")]
    ['GPU:0', 'GPU:1']
    """

    cpu_count: int
    memory_bytes: int | None = None
    devices: tuple[Device, ...] = (Device("CPU:0", "CPU"),)
    gpus: tuple[Device, ...] = ()
    cluster: Cluster | None = None

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """The logical devices of a kind: `CPU` or `GPU`."""
        return tuple(device for device in self.devices if device.kind == kind)

    def device_bytes(self, names: Collection[str] = ()) -> int | None:
        """The memory of the smallest GPU, or without one of the CPU, or `None`; only of those named, if any are."""
        devices = self.of_kind("GPU") or self.of_kind("CPU")
        devices = [device for device in devices if device.name in names or not names]
        sizes = [device.memory_bytes for device in devices if device.memory_bytes is not None]
        if not devices or len(sizes) < len(devices):
            return None
        # Logical CPU devices share the machine's.
        return min(sizes) // (len(sizes) if devices[0].kind == "CPU" else 1)

    @property
    def has_virtual_gpus(self) -> bool:
        """Whether a GPU is divided into several logical devices, which NCCL does not support."""
        return len(self.of_kind("GPU")) > len(self.gpus)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and reports for all: the chief, the first worker, or the only process."""
        return self.cluster is None or self.cluster.is_chief

    @property
    def worker_count(self) -> int:
        """Number of processes that train together: 1 without a cluster."""
        return self.cluster.worker_count if self.cluster else 1

    @property
    def trains_alone(self) -> bool:
        """Whether no other process of the cluster trains with this one: the others may be lost for now."""
        cluster = self.cluster
        if cluster is None or cluster.jobs.get("ps"):
            return False
        return cluster.worker_count == 1 or cluster.job == "evaluator"


def detect(environment: Mapping[str, str] | None = None) -> Hardware:
    """Detects the hardware to train on.

    Doesn't initialize TensorFlow's runtime: logical devices and a multi-worker strategy can still be set up.

    Args:
        environment: Environment variables that may describe a cluster; by default this process's.

    Returns:
        The hardware; without an accelerator, the CPU.

    Raises:
        ValueError: The environment's description of a cluster is malformed.
    """
    environment = os.environ if environment is None else environment
    memory = None
    with contextlib.suppress(AttributeError, ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    physical = tf.config.get_visible_devices("GPU")
    gpus = _gpus(physical, memory_by_name() if physical else {})
    devices = logical_devices(gpus, memory)
    return Hardware(
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory,
        devices=devices,
        gpus=gpus,
        cluster=find_cluster(environment),
    )


def logical_devices(gpus: tuple[Device, ...] | None = None, memory: int | None = None) -> tuple[Device, ...]:
    """The logical devices that TensorFlow has created, or will create, for this process."""
    cpus, visible_gpus = map(tf.config.get_visible_devices, KINDS)
    described = [
        *(Device("", "CPU", memory) for _ in cpus),
        *(_gpus(visible_gpus, {}) if gpus is None else gpus),
    ]
    devices: list[Device] = []
    counts = Counter[str]()
    for physical, device in zip([*cpus, *visible_gpus], described, strict=True):
        # Reading their configuration doesn't create the logical devices.
        for configuration in tf.config.get_logical_device_configuration(physical) or [None]:
            limit = configuration.memory_limit if configuration else None
            size = int(limit) * 2**20 if limit else device.memory_bytes
            name = f"{device.kind}:{counts[device.kind]}"
            devices.append(Device(name, device.kind, size, device.compute_capability, device.description))
            counts[device.kind] += 1
    return tuple(devices)


def memory_by_name() -> dict[str, int]:
    """The memory in bytes of each GPU model by name, from `nvidia-smi`; empty if it fails.

    By name, since TensorFlow and `nvidia-smi` may number GPUs differently. Models with several sizes are omitted.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    sizes: dict[str, set[int]] = {}
    for line in answer.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            sizes.setdefault(name.strip(), set()).add(int(mebibytes) * 2**20)
    return {name: values.pop() for name, values in sizes.items() if len(values) == 1}


def _gpus(physical: Sequence[tf.config.PhysicalDevice], memory: Mapping[str, int]) -> tuple[Device, ...]:
    """Describes physical GPUs, given the memory of each GPU model by name."""
    gpus = []
    for index, gpu in enumerate(physical):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "")
        gpus.append(Device(f"GPU:{index}", "GPU", memory.get(name), details.get("compute_capability"), name))
    return tuple(gpus)


def canonical_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Device names in their shortest form, such as `CPU:0`; refuses repeated names, and devices of several kinds."""
    names = check_each("devices", devices, _canonical_device, "names of devices", example="['CPU:0', 'CPU:1']")
    if not names:
        raise ValueError("`devices` is empty. Name one or more, such as ['GPU:0'], or leave it out.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"`devices` names {quote(repeated)} more than once. A device takes one replica.")
    if len({kind_of_device(name) for name in names}) > 1:
        raise ValueError(
            f"`devices` is {quote(names)}, of several kinds. Name devices of one kind: replicas take equal replica "
            "batches, and all wait for the slowest."
        )
    return names


def kind_of_device(name: str) -> str:
    """`CPU` or `GPU`."""
    return name.partition(":")[0]


def _canonical_device(argument: str, name: object) -> str:
    match = _DEVICE_NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        raise refusal(argument, name, "the name of a device, such as 'CPU:0' or 'GPU:1'")
    return f"{match[1].upper()}:{int(match[2])}"
