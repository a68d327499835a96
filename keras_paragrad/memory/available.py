"""How much memory a device has left for training: of a GPU, or of the machine and the control group of a process."""

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

_SMI_SECONDS = 10
_UNLIMITED = 2**60


def resident_bytes(process: int | str = "self", *, peak: bool = False) -> int | None:
    """The bytes of memory that a process holds, or has held at most; `None` if it is gone, or can't be asked.

    Args:
        process: Its number, or `"self"`.
        peak: Whether the most is asked for.
    """
    name = "VmHWM" if peak else "VmRSS"
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        # Without Linux's files, a process knows its own peak alone.
        return _peak() if process == "self" and not Path("/proc/self").exists() else None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _peak() -> int:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """The memory that another process could take: the machine's, or what a control group leaves; `None` if unknown."""
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
    """What each control group around this process leaves of its limit, in both versions of Linux's interface."""
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
        # In a container, the group is the root of what can be seen.
        for folder in dict.fromkeys((base, inside, *inside.parents)):
            if folder.is_relative_to(base) and (left := _left_in(folder, *names)) is not None:
                found.append(left)
    return found


_NAMES_OF_FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _left_in(folder: Path, limit: str, usage: str) -> int | None:
    """What a control group leaves of its limit; files that it has only read can be dropped."""
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
    """The memory that is free on each of the machine's GPUs, from `nvidia-smi`; `None` if it can't be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(line) * 2**20 for line in answer.split() if line.isdecimal()), default=None)
