"""Measures memory in use: the current value, and the peak in a trace window."""

import functools
import logging
import os
from typing import Any

import tensorflow as tf

from keras_paragrad.extras import explain_missing, is_installed
from keras_paragrad.profiling.summary import MemoryUse

_log = logging.getLogger("keras_paragrad")


class PeakMemory:
    """Samples the process's memory once per call; devices track their own peak."""

    def __init__(self):
        self._samples_host = is_installed("psutil")
        self._batches: list[float] = []
        self._host: list[float] = []
        for device in _tracked_devices():
            tf.config.experimental.reset_memory_stats(device)

    def sample(self, batch: int) -> None:
        """Samples the process's current memory, as a batch begins."""
        if self._samples_host:
            self._batches.append(batch)
            self._host.append(host_memory())

    def samples(self) -> tuple[MemoryUse, ...]:
        """The samples, if there are any."""
        return (MemoryUse("host", tuple(self._batches), tuple(self._host)),) if self._host else ()

    def peaks(self) -> dict[str, int | None]:
        """Peak memory in bytes by device or `"host"`; `None` where TensorFlow doesn't track it."""
        tracked = set(_tracked_devices())
        names = [_short_name(device.name) for device in tf.config.list_logical_devices()]
        devices = {
            name: tf.config.experimental.get_memory_info(name)["peak"] if name in tracked else None for name in names
        }
        return {"host": max(map(int, self._host), default=None), **devices}


def can_read_host_memory() -> bool:
    """Whether psutil is installed; otherwise logs what to install."""
    if not is_installed("psutil"):
        _log.warning("%s", explain_missing("Throughput's host_memory_bytes", ["psutil"]))
        return False
    return True


def host_memory() -> int:
    """The resident memory of this process, in bytes."""
    return _process(os.getpid()).memory_info().rss


def device_memory() -> int | None:
    """The bytes that TensorFlow holds on this process's accelerators; `None` if it tracks none of them."""
    sizes = []
    for device in tf.config.list_logical_devices():
        if device.device_type == "CPU":
            # TensorFlow reports zeros there.
            continue
        try:
            sizes.append(tf.config.experimental.get_memory_info(device.name)["current"])
        except (ValueError, tf.errors.OpError):
            continue
    return sum(sizes) if sizes else None


def _tracked_devices() -> list[str]:
    # For CPUs, TensorFlow reports zeros without an error.
    return [_short_name(device.name) for device in tf.config.list_logical_devices() if device.device_type == "GPU"]


def _short_name(name: str) -> str:
    return name.rpartition("device:")[2]


# Creating one takes as long as querying it.
@functools.cache
def _process(pid: int) -> Any:
    import psutil

    return psutil.Process(pid)
