"""Peak memory during a trace window."""

from typing import Any

import tensorflow as tf


class PeakMemory:
    """Samples the process's memory once per call; devices track their own peak."""

    def __init__(self):
        self._process = _this_process()
        self._host: int | None = None
        for device in _with_a_count():
            tf.config.experimental.reset_memory_stats(device)

    def look(self) -> None:
        """Samples the process's current memory."""
        if self._process is not None:
            self._host = max(self._host or 0, self._process.memory_info().rss)

    def found(self) -> dict[str, int | None]:
        """Peak memory in bytes by device or `"host"`; `None` where TensorFlow doesn't track it."""
        counted = set(_with_a_count())
        names = [_short_name(device.name) for device in tf.config.list_logical_devices()]
        devices = {
            name: tf.config.experimental.get_memory_info(name)["peak"] if name in counted else None for name in names
        }
        return {"host": self._host, **devices}


def _this_process() -> Any:
    try:
        import psutil
    except ImportError:
        return None
    return psutil.Process()


def _with_a_count() -> list[str]:
    # For CPUs, TensorFlow reports zeros without an error.
    return [_short_name(device.name) for device in tf.config.list_logical_devices() if device.device_type == "GPU"]


def _short_name(name: str) -> str:
    return name.rpartition("device:")[2]
