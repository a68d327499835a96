"""How much memory is in use."""

import functools
import logging
import os
from typing import Any

import tensorflow as tf

from keras_paragrad.extras import explain_missing, is_installed

_log = logging.getLogger("keras_paragrad")


def says_host_memory() -> bool:
    """Whether psutil is installed; otherwise logs what to install."""
    found = is_installed("psutil")
    if not found:
        _log.warning("%s", explain_missing("Throughput's host_memory_bytes", ["psutil"]))
    return found


def host_memory() -> int:
    """The resident memory of this process, in bytes."""
    return _process(os.getpid()).memory_info().rss


def device_memory() -> int | None:
    """The bytes that TensorFlow holds on this process's accelerators; `None` where no device can say."""
    found = []
    for device in tf.config.list_logical_devices():
        if device.device_type == "CPU":
            # It reports zeros there, which are meaningless.
            continue
        try:
            found.append(tf.config.experimental.get_memory_info(device.name)["current"])
        except (ValueError, tf.errors.OpError):
            continue
    return sum(found) if found else None


# Creating one takes as long as querying it.
@functools.cache
def _process(pid: int) -> Any:
    import psutil

    return psutil.Process(pid)
