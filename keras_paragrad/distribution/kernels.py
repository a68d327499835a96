"""Describes the hardware and kernels that determine results bit for bit."""

import os
import platform
from pathlib import Path

import tensorflow as tf

_CPU_INFO = Path("/proc/cpuinfo")
THREADS = "TF_NUM_INTRAOP_THREADS"


def describe_kernels() -> dict[str, str]:
    """Describes the processor, the intra-op threads, the GPUs and the libraries."""
    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
    return {
        "processor": _processor(),
        "threads of an operation": str(_threads()),
        "GPUs": ", ".join(sorted(set(names))) or "none",
        "oneDNN": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "as installed"),
        "tensorflow": tf.__version__,
    }


def kernel_differences(here: dict[str, str], there: dict[str, str]) -> str:
    """Lists the differences between two descriptions."""
    names = [name for name in here if here[name] != there.get(name)]
    return "; ".join(f"{name}: {there.get(name, 'unknown')} there, {here[name]} here" for name in names)


def _processor() -> str:
    if _CPU_INFO.is_file():
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if models:
            return models[0]
    return platform.processor() or platform.machine()


def _threads() -> int:
    """The number of CPU threads that a TensorFlow operation may use."""
    if stated := tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get(THREADS) or 0):
        return stated
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
