"""Measures the memory available for training: on a GPU, or on the machine and in the process's control group."""

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

_SMI_SECONDS = 10
_UNLIMITED = 2**60


def resident_bytes(process: int | str = "self", *, peak: bool = False) -> int | None:
    """A process's resident memory or its peak, in bytes; `None` if the process is gone or can't be inspected.

    Args:
        process: The process's id, or `"self"`.
        peak: Whether to return the peak.
    """
    name = "VmHWM" if peak else "VmRSS"
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        # Without Linux's files, a process knows only its own peak.
        return _peak() if process == "self" and not Path("/proc/self").exists() else None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _peak() -> int:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """The bytes that another process could allocate, on the machine and in control groups; `None` if unknown."""
    sizes = [size for size in (_of_machine(), *_of_groups()) if size is not None]
    return min(sizes, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _of_groups(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The bytes left below the limit of each control group around this process, in either version of the interface."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return []
    found: list[int] = []
    for _, controllers, path in lines:
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root if controllers == "" else root / "memory"
        names = ("memory.max", "memory.current") if controllers == "" else _NAMES_OF_FIRST_VERSION
        inside = base / path.lstrip("/")
        # In a container, the group is the visible root.
        for folder in dict.fromkeys((base, inside, *inside.parents)):
            if folder.is_relative_to(base) and (left := _left_in(folder, *names)) is not None:
                found.append(left)
    return found


_NAMES_OF_FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _left_in(folder: Path, limit: str, usage: str) -> int | None:
    """The bytes left below a control group's limit; the cache of files it has only read counts as free."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        statistics = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return None
    if most == "max" or int(most) >= _UNLIMITED:
        return None
    dropped = statistics.get("inactive_file", statistics.get("total_inactive_file", 0))
    return max(0, int(most) - used + dropped)


def free_on_gpus() -> int | None:
    """The free memory of each of the machine's GPUs, from `nvidia-smi`; `None` if it can't be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(line) * 2**20 for line in answer.split() if line.isdecimal()), default=None)
