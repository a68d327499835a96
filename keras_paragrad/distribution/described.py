"""Machines that aren't here, described: to see what would be decided on them."""

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
    """Describes a machine, or a cluster of equal ones seen from the first of them.

    Args:
        cpus: Processors of a worker.
        gpus: GPUs of a worker.
        gpu_memory_gb: The memory of each GPU, in GiB.
        compute_capability: Of each GPU, such as `(8, 0)`.
        tpu_cores: Cores of a TPU.
        workers: How many processes train together.
        ps: How many parameter servers there are; with any, the cluster has a chief too.
        logical_cpus: How many logical devices TensorFlow makes of the processor.

    Returns:
        The description, for `make_plan`.

    Raises:
        ValueError: There is less than nothing of a part, or no worker or processor.

    Example:

    >>> from keras_paragrad.distribution.described import describe
    >>> from keras_paragrad.distribution.options import Options
    >>> from keras_paragrad.distribution.plan import make_plan
    >>> make_plan(describe(gpus=8, workers=2), Options()).replicas.value
    16
    """
    least = {"cpus": 1, "gpus": 0, "tpu_cores": 0, "workers": 1, "ps": 0, "logical_cpus": 1}
    given = dict(zip(least, (cpus, gpus, tpu_cores, workers, ps, logical_cpus), strict=True))
    for name, number in given.items():
        if number < least[name]:
            raise ValueError(f"{name} is {number}. Expected {least[name]} or more.")
    memory = None if gpu_memory_gb is None else int(gpu_memory_gb * 2**30)
    of_gpus = tuple(Device(f"GPU:{index}", "GPU", memory, compute_capability) for index in range(gpus))
    of_tpu = tuple(Device(f"TPU:{index}", "TPU") for index in range(tpu_cores))
    processors = tuple(Device(f"CPU:{index}", "CPU") for index in range(logical_cpus))
    return Hardware(cpus, None, (*processors, *of_gpus, *of_tpu), of_gpus, of_tpu, _cluster(workers, ps))


def _cluster(workers: int, ps: int) -> Cluster | None:
    hosts = tuple(f"worker{index}:2222" for index in range(workers))
    if ps:
        servers = tuple(f"ps{index}:2222" for index in range(ps))
        return Cluster({"chief": ("chief0:2222",), "worker": hosts, "ps": servers}, "chief", 0, "a description")
    return Cluster({"worker": hosts}, "worker", 0, "a description") if workers > 1 else None
