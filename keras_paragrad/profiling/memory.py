"""Measures memory in use: the current value, and the peak in a trace window."""

import contextlib
import functools
import os
from typing import Any

import tensorflow as tf

from keras_paragrad.extras import is_installed
from keras_paragrad.profiling.summary import MemoryUse


class PeakMemory:
    """Samples the process's memory once per call; devices track their own peak."""

    def __init__(self):
        self._samples_host = is_installed("psutil")
        self._batches: list[float] = []
        self._host: list[float] = []
        for device in self._gpus():
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
        devices = dict.fromkeys(device.name.rpartition("device:")[2] for device in tf.config.list_logical_devices())
        peaks = {name: tf.config.experimental.get_memory_info(name)["peak"] for name in self._gpus()}
        return {"host": max(map(int, self._host), default=None), **devices, **peaks}

    @staticmethod
    def _gpus() -> list[str]:
        # For CPUs, TensorFlow reports zeros without an error.
        return [device.name.rpartition("device:")[2] for device in tf.config.list_logical_devices("GPU")]


def host_memory() -> int:
    """The resident memory of this process, in bytes."""
    return _process(os.getpid()).memory_info().rss


def device_memory() -> int | None:
    """The bytes that TensorFlow holds on this process's accelerators; `None` if it tracks none of them."""
    sizes = []
    for device in tf.config.list_logical_devices():
        # For CPUs, TensorFlow reports zeros.
        with contextlib.suppress(ValueError, tf.errors.OpError):
            if device.device_type != "CPU":
                sizes.append(tf.config.experimental.get_memory_info(device.name)["current"])
    return sum(sizes) if sizes else None


# Creating one takes as long as querying it.
@functools.cache
def _process(pid: int) -> Any:
    import psutil

    return psutil.Process(pid)
