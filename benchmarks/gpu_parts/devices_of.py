"""The devices of a process, and what there is to be known of them."""

import importlib
import platform
import shutil
import subprocess
from typing import Any

import tensorflow as tf

from gpu_parts.case import Machine
from keras_paragrad.distribution.hardware import memory_by_name

# By their modules: a distribution may have another name, as `keras-nightly`.
VERSIONS = ("tensorflow", "keras", "keras_paragrad", "numpy")
# Of each of two logical devices on one card, in MiB.
PART_OF_A_CARD = 6 * 1024


def make(cpu: bool, count: int) -> Machine:
    """Sets up devices, before TensorFlow starts.

    Args:
        cpu: Whether to take logical CPU devices.
        count: How many are wanted.

    Returns:
        The machine. A card is divided only if there are fewer than wanted.
    """
    cards = tf.config.list_physical_devices("GPU")
    if not cpu and not cards:
        raise SystemError("TensorFlow sees no GPU.")
    if cpu or len(cards) < count:
        limit = None if cpu else PART_OF_A_CARD
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=limit)] * count
        physical = tf.config.list_physical_devices("CPU") if cpu else cards
        tf.config.set_logical_device_configuration(physical[0], logical)
    else:
        for card in cards:
            tf.config.experimental.set_memory_growth(card, True)
    if cpu:
        # Optimizing graphs takes longer than running them.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    names = tuple(f"{'CPU' if cpu else 'GPU'}:{index}" for index in range(count))
    return Machine(cpu, names, None if cpu else memory_by_name().get(_details(cards)["device_name"]))


def described() -> dict[str, Any]:
    """The card, its driver, CUDA and versions; without a GPU, the processor's name in place of a card's."""
    cards = tf.config.list_physical_devices("GPU")
    details = _details(cards)
    build = tf.sysconfig.get_build_info()
    return {
        "card": details.get("device_name", "CPU"),
        "cards": len(cards),
        "compute capability": ".".join(map(str, details.get("compute_capability", ()))),
        "driver": _driver(),
        "CUDA of TensorFlow's build": build.get("cuda_version", ""),
        "cuDNN of TensorFlow's build": build.get("cudnn_version", ""),
        "Python": platform.python_version(),
        **{name: importlib.import_module(name).__version__ for name in VERSIONS},
    }


def _details(cards: list) -> dict[str, Any]:
    return tf.config.experimental.get_device_details(cards[0]) if cards else {}


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
