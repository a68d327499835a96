"""The memory that TensorFlow's allocators held during the steps of a trace."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_paragrad.profiling.analysis.events import NANOSECONDS
from keras_paragrad.profiling.analysis.operations import xprof_tool
from keras_paragrad.profiling.summary import MemoryUse, StepTime

_PICOSECONDS_PER_NANOSECOND = 1e3


def memory_use(file: Path, steps: Sequence[StepTime], origin: float) -> tuple[MemoryUse, ...]:
    """The memory of each allocator by xprof's `memory_profile`, which keeps the largest of a thousand values.

    TensorFlow's allocators for GPUs, and for the large tensors of CPUs with oneDNN, record what they hold.

    Args:
        file: An `.xplane.pb` file.
        steps: The steps.
        origin: When the first step begins, in nanoseconds.
    """
    profile = xprof_tool(file, "memory_profile") if steps else None
    found = []
    for name, memory in (profile or {}).get("memoryProfilePerAllocator", {}).items():
        snapshots = memory.get("sampledTimelineSnapshots", [])
        times = np.array([float(one["timeOffsetPs"]) / _PICOSECONDS_PER_NANOSECOND for one in snapshots])
        held = np.array([float(one["aggregationStats"]["heapAllocatedBytes"]) for one in snapshots])
        batches = in_batches((times - origin) / NANOSECONDS, steps)
        inside = np.isfinite(batches)
        if inside.any():
            found.append(MemoryUse(name, tuple(batches[inside].tolist()), tuple(held[inside].tolist())))
    return tuple(found)


def in_batches(times: np.ndarray, steps: Sequence[StepTime]) -> np.ndarray:
    """Converts milliseconds after the start of the first step to batches, 7.5 in the middle of 7; NaN outside of steps.

    Example:

    >>> import numpy as np
    >>> from keras_paragrad.profiling.summary import StepTime
    >>> in_batches(np.array([5.0, 13.0, 17.0]), [StepTime(7, 7, 0.0, 10.0), StepTime(8, 8, 12.0, 4.0)])
    array([7.5 , 8.25,  nan])
    """
    begins, durations = (np.array([getattr(step, name) for step in steps]) for name in ("begins", "duration"))
    batches = np.array([step.step for step in steps])
    indices = np.clip(np.searchsorted(begins, times, side="right") - 1, 0, None)
    fractions = (times - begins[indices]) / durations[indices]
    return np.where((fractions >= 0) & (fractions < 1), np.round(batches[indices] + fractions, 4), np.nan)
