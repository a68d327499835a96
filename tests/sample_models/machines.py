"""Machines that aren't here, and clusters of them as seen from the first."""

from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.hardware import Device, Hardware


def describe(cpus=1, gpus=0, gpu_memory_gb=None, compute_capability=None, workers=1, ps=0, logical_cpus=1) -> Hardware:
    memory = None if gpu_memory_gb is None else int(gpu_memory_gb * 2**30)
    gpu_devices = tuple(Device(f"GPU:{index}", "GPU", memory, compute_capability) for index in range(gpus))
    cpu_devices = tuple(Device(f"CPU:{index}", "CPU") for index in range(logical_cpus))
    counts = {"chief": 1, "worker": workers, "ps": ps} if ps else {"worker": workers}
    jobs = {job: tuple(f"{job}{index}:2222" for index in range(count)) for job, count in counts.items()}
    cluster = Cluster(jobs, next(iter(jobs)), 0, "TF_CONFIG") if workers > 1 or ps else None
    devices = (*cpu_devices, *gpu_devices)
    return Hardware(cpus, None, devices, gpu_devices, cluster)
