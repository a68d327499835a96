"""The hardware to train on: processors, accelerators, memory, and the cluster they belong to."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from keras_paragrad.distribution.cluster import Cluster, find_cluster

KINDS = ("CPU", "GPU", "TPU")
TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID")
_SMI_SECONDS = 10


@dataclass(frozen=True)
class Device:
    """A device that a replica can run on.

    Attributes:
        name: As in TensorFlow and `DistributedFit(devices=...)`: `GPU:0`.
        kind: `CPU`, `GPU` or `TPU`.
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
    """The hardware to train on, found by `detect` or described by hand.

    Attributes:
        cpu_count: Number of processors that this process may use.
        memory_bytes: The machine's memory, in bytes, or `None` if unknown.
        devices: The logical devices of all kinds.
        gpus: The physical GPUs, which may be divided into several logical devices.
        tpus: The TPU's cores; a single entry if only the environment mentions a TPU.
        cluster: The processes that train together, or `None`.
        tpu_name: The value of `TPU_NAME`.

    Example: a machine that isn't here.

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
    tpus: tuple[Device, ...] = ()
    cluster: Cluster | None = None
    tpu_name: str | None = None

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """The logical devices of a kind: `CPU`, `GPU` or `TPU`."""
        return tuple(device for device in self.devices if device.kind == kind)

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


def detect(environment: Mapping[str, str] | None = None) -> Hardware:
    """Detects the hardware to train on.

    Does not initialize TensorFlow's runtime: logical devices and the multi-worker strategy can still be set up
    afterwards.

    Args:
        environment: Environment variables that may describe a cluster or a TPU; by default this process's.

    Returns:
        The hardware; without an accelerator, the CPU.

    Raises:
        ValueError: The environment's description of a cluster is malformed.
    """
    environment = os.environ if environment is None else environment
    machine = _machine_memory()
    physical = tf.config.get_visible_devices("GPU")
    gpus = _gpus(physical, memory_by_name() if physical else {})
    devices = logical_devices(gpus, machine)
    tpus = tuple(device for device in devices if device.kind == "TPU")
    return Hardware(
        cpu_count=_usable_cpus(),
        memory_bytes=machine,
        devices=devices,
        gpus=gpus,
        tpus=tpus or _tpus_by_environment(environment),
        cluster=find_cluster(environment),
        tpu_name=environment.get("TPU_NAME"),
    )


def logical_devices(gpus: tuple[Device, ...] | None = None, memory: int | None = None) -> tuple[Device, ...]:
    """The logical devices that TensorFlow has created, or will create, for this process.

    Args:
        gpus: The physical GPUs; by default they are looked up, without their memory size.
        memory: The machine's memory, in bytes.
    """
    physical = {kind: tf.config.get_visible_devices(kind) for kind in KINDS}
    whole = [
        *(Device("", "CPU", memory) for _ in physical["CPU"]),
        *(_gpus(physical["GPU"], {}) if gpus is None else gpus),
        *(Device("", "TPU") for _ in physical["TPU"]),
    ]
    return _logical([one for kind in KINDS for one in physical[kind]], whole)


def memory_by_name() -> dict[str, int]:
    """Queries `nvidia-smi` for the memory of each GPU model, in bytes.

    By model rather than index, since TensorFlow and `nvidia-smi` may number GPUs differently. Models found with
    several memory sizes are omitted.

    Returns:
        From names, as in TensorFlow's `device_name`, to bytes; empty if `nvidia-smi` is missing or doesn't answer.
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
    return {name: found.pop() for name, found in sizes.items() if len(found) == 1}


def _gpus(physical: list, memory: Mapping[str, int]) -> tuple[Device, ...]:
    gpus = []
    for index, gpu in enumerate(physical):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "")
        gpus.append(Device(f"GPU:{index}", "GPU", memory.get(name), details.get("compute_capability"), name))
    return tuple(gpus)


def _logical(physical: list, whole: list[Device]) -> tuple[Device, ...]:
    """The logical devices that TensorFlow will create from the physical ones, without triggering that."""
    devices, counts = [], Counter()
    for one, device in zip(physical, whole, strict=True):
        for part in tf.config.get_logical_device_configuration(one) or [None]:
            limit = part.memory_limit if part else None
            memory = int(limit) * 2**20 if limit else device.memory_bytes
            name = f"{device.kind}:{counts[device.kind]}"
            devices.append(Device(name, device.kind, memory, device.compute_capability, device.description))
            counts[device.kind] += 1
    return tuple(devices)


def _tpus_by_environment(environment: Mapping[str, str]) -> tuple[Device, ...]:
    """A TPU whose cores TensorFlow sees only after connecting to it."""
    told = [f"{name}={environment[name]}" for name in TPU_VARIABLES if environment.get(name)]
    return (Device("TPU", "TPU", description=", ".join(told)),) if told else ()


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
