"""Descriptions of other machines, to see the plan for them."""

import functools
from typing import Any

from keras_paragrad.arguments import check_each, check_integer, check_number, refusal
from keras_paragrad.distribution.choices import MOST_DESCRIBED as MOST
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.hardware import Device, Hardware


def describe(
    cpus: int = 1,
    gpus: int = 0,
    gpu_memory_gb: float | None = None,
    compute_capability: tuple[int, int] | None = None,
    tpu_cores: int = 0,
    workers: int = 1,
    ps: int = 0,
    logical_cpus: int = 1,
) -> Hardware:
    """Describes a machine, or a cluster of identical machines as seen from the first.

    Args:
        cpus: Number of processors per worker.
        gpus: Number of GPUs per worker.
        gpu_memory_gb: Memory of each GPU, in GiB.
        compute_capability: Of each GPU, such as `(8, 0)`.
        tpu_cores: Number of TPU cores.
        workers: Number of processes that train together.
        ps: Number of parameter servers; if there are any, the cluster also has a chief.
        logical_cpus: Number of logical CPU devices that TensorFlow creates.

    Returns:
        The description, for `make_plan`.

    Raises:
        ValueError: A count is negative or implausibly large, or there is no worker or processor.

    Example:

    >>> from keras_paragrad.distribution import describe
    >>> from keras_paragrad.distribution import Options
    >>> from keras_paragrad.distribution import make_plan
    >>> make_plan(describe(gpus=8, workers=2), Options()).replicas.value
    16
    """
    cpus = check_integer("cpus", cpus, most=MOST)
    gpus = check_integer("gpus", gpus, least=0, most=MOST)
    tpu_cores = check_integer("tpu_cores", tpu_cores, least=0, most=MOST)
    workers = check_integer("workers", workers, most=MOST)
    ps = check_integer("ps", ps, least=0, most=MOST)
    logical_cpus = check_integer("logical_cpus", logical_cpus, most=MOST)
    gigabytes = check_number("gpu_memory_gb", gpu_memory_gb, above=0, most=MOST, example=80, optional=True)
    if compute_capability is not None:
        compute_capability = _checked_capability(compute_capability)
    memory = None if gigabytes is None else int(gigabytes * 2**30)
    of_gpus = tuple(Device(f"GPU:{index}", "GPU", memory, compute_capability) for index in range(gpus))
    of_tpu = tuple(Device(f"TPU:{index}", "TPU") for index in range(tpu_cores))
    processors = tuple(Device(f"CPU:{index}", "CPU") for index in range(logical_cpus))
    return Hardware(cpus, None, (*processors, *of_gpus, *of_tpu), of_gpus, of_tpu, _cluster(workers, ps))


def _checked_capability(found: Any) -> tuple[int, int]:
    expected = "two integers, such as (9, 0)"
    digits = functools.partial(check_integer, least=0, most=99)
    major_and_minor = check_each("compute_capability", found, digits, expected, example="(9, 0)")
    if len(major_and_minor) != 2:
        raise refusal("compute_capability", found, expected, "(9, 0)")
    return major_and_minor[0], major_and_minor[1]


def _cluster(workers: int, ps: int) -> Cluster | None:
    hosts = tuple(f"worker{index}:2222" for index in range(workers))
    if ps:
        servers = tuple(f"ps{index}:2222" for index in range(ps))
        return Cluster({"chief": ("chief0:2222",), "worker": hosts, "ps": servers}, "chief", 0, "a description")
    return Cluster({"worker": hosts}, "worker", 0, "a description") if workers > 1 else None
