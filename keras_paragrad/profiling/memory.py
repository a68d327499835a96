"""The most memory in use while a window is traced."""

from typing import Any

import tensorflow as tf


class PeakMemory:
    """Looks at what the process uses, once a call; devices keep count of their peak themselves."""

    def __init__(self):
        self._process = _this_process()
        self._host: int | None = None
        for device in _with_a_count():
            tf.config.experimental.reset_memory_stats(device)

    def look(self) -> None:
        """Takes note of what the process uses now."""
        if self._process is not None:
            self._host = max(self._host or 0, self._process.memory_info().rss)

    def found(self) -> dict[str, int | None]:
        """By device or `"host"`, the most memory in bytes; `None` where TensorFlow doesn't count."""
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
    # Of a CPU, TensorFlow reports zeros, without an error.
    return [_short_name(device.name) for device in tf.config.list_logical_devices() if device.device_type == "GPU"]


def _short_name(name: str) -> str:
    return name.rpartition("device:")[2]
