"""How much memory is in use."""

import functools
import logging
import os
from typing import Any

import tensorflow as tf

from keras_paragrad.extras import explain_missing, is_installed

_log = logging.getLogger("keras_paragrad")


def says_host_memory() -> bool:
    """Whether psutil is here to ask; says what to install, if not."""
    found = is_installed("psutil")
    if not found:
        _log.warning("%s", explain_missing("Throughput's host_memory_bytes", ["psutil"]))
    return found


def host_memory() -> int:
    """The bytes of this process that are in memory."""
    return _process(os.getpid()).memory_info().rss


def device_memory() -> int | None:
    """The bytes that TensorFlow holds on this process's accelerators; `None` where no device can say."""
    found = []
    for device in tf.config.list_logical_devices():
        if device.device_type == "CPU":
            # It gives zeros there, which mean nothing.
            continue
        try:
            found.append(tf.config.experimental.get_memory_info(device.name)["current"])
        except (ValueError, tf.errors.OpError):
            continue
    return sum(found) if found else None


# Making one takes as long as asking it.
@functools.cache
def _process(pid: int) -> Any:
    import psutil

    return psutil.Process(pid)
