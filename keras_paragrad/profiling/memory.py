"""How much memory is in use, now and at the peak of a trace window."""

import functools
import logging
import os
from typing import Any

import tensorflow as tf

from keras_paragrad.extras import explain_missing, is_installed

_log = logging.getLogger("keras_paragrad")


class PeakMemory:
    """Samples the process's memory once per call; devices track their own peak."""

    def __init__(self):
        self._counts_host = is_installed("psutil")
        self._host: int | None = None
        for device in _with_a_count():
            tf.config.experimental.reset_memory_stats(device)

    def look(self) -> None:
        """Samples the process's current memory."""
        if self._counts_host:
            self._host = max(self._host or 0, host_memory())

    def found(self) -> dict[str, int | None]:
        """Peak memory in bytes by device or `"host"`; `None` where TensorFlow doesn't track it."""
        counted = set(_with_a_count())
        names = [_short_name(device.name) for device in tf.config.list_logical_devices()]
        devices = {
            name: tf.config.experimental.get_memory_info(name)["peak"] if name in counted else None for name in names
        }
        return {"host": self._host, **devices}


def can_read_host_memory() -> bool:
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


def _with_a_count() -> list[str]:
    # For CPUs, TensorFlow reports zeros without an error.
    return [_short_name(device.name) for device in tf.config.list_logical_devices() if device.device_type == "GPU"]


def _short_name(name: str) -> str:
    return name.rpartition("device:")[2]


# Creating one takes as long as querying it.
@functools.cache
def _process(pid: int) -> Any:
    import psutil

    return psutil.Process(pid)
