"""Measures the memory available for training: on a GPU, or on the machine and in the process's cgroup."""

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

import tensorflow as tf

# The share of a device's memory that a step may take by its estimate alone; the rest covers the estimate's error,
# TensorFlow and the data.
STEP_SHARE = 0.8
# The share of the available memory that training may take: other processes use the machine, and TensorFlow the GPU.
_HOST_FRACTION, _GPU_FRACTION = 0.8, 0.9
_SMI_SECONDS = 10


def resident_bytes(process: int | str = "self", *, peak: bool = False) -> int | None:
    """A process's resident memory or its peak, in bytes; `None` if the process is gone or can't be inspected."""
    name = "VmHWM" if peak else "VmRSS"
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        # Without Linux's files, a process knows only its own peak.
        if process != "self" or Path("/proc/self").exists():
            return None
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def available_bytes() -> int | None:
    """The bytes that another process could allocate, on the machine and in its cgroups; `None` if unknown."""
    sizes = [size for size in (_of_machine(), *_of_cgroups()) if size is not None]
    return min(sizes, default=None)


def _of_machine() -> int | None:
    """The bytes that are free on the machine, or where that is unknown, all of its memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _of_cgroups(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The bytes left below the limit of each cgroup (version 2) around this process."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return []
    # In a container, the group is the visible root.
    paths = [root / path.lstrip("/") for _, controllers, path in lines if not controllers]
    folders = dict.fromkeys(folder for path in paths for folder in (root, path, *path.parents))
    left = (_left_in(folder) for folder in folders if folder.is_relative_to(root))
    return [size for size in left if size is not None]


def _left_in(folder: Path) -> int | None:
    """The bytes left below a cgroup's limit, or `None` without one; the cache of files it has only read is free."""
    try:
        limit, used = int((folder / "memory.max").read_text()), int((folder / "memory.current").read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = {name: int(value) for name, value in pairs}["inactive_file"]
    except (OSError, ValueError, KeyError):  # "max", where there is no limit
        return None
    return max(0, limit - used + reclaimable)


def least_free_gpu_bytes() -> int | None:
    """The free memory, in bytes, of the GPU that has the least, by `nvidia-smi`; `None` if it fails or lists none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(line) * 2**20 for line in answer.split() if line.isdecimal()), default=None)


def memory_of_device(device_bytes: int | None, steps: int) -> int:
    """The bytes that training may take: `device_bytes`, or by default a share of what is available.

    Raises:
        ValueError: It is unknown, or the GPU can't run a trial of `steps` > 0. The message says what to write.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if steps and (problem := cannot_try_on_gpus()):
        raise ValueError(problem)
    if device_bytes is not None:
        return device_bytes
    left, share = (least_free_gpu_bytes(), _GPU_FRACTION) if gpus else (available_bytes(), _HOST_FRACTION)
    if left is None:
        raise ValueError(
            "How much memory the device has left is unknown here. Write device_bytes=16 * 2**30, for instance."
        )
    return max(1, int(share * left))


def cannot_try_on_gpus() -> str:
    """Why no other process can train on the GPUs of this one, and what to write; empty if one can."""
    gpus = tf.config.get_visible_devices("GPU")
    grows = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true"
    if not gpus or grows or all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus):
        return ""
    return (
        f"This process has reserved the memory of {gpus[0].name.rpartition('device:')[2]}, as TensorFlow does by "
        "default, so no other process can try a batch there. Write\n    for gpu in "
        "tf.config.list_physical_devices('GPU'): tf.config.experimental.set_memory_growth(gpu, True)\nbefore the "
        "first tensor, or set TF_FORCE_GPU_ALLOW_GROWTH=true."
    )
