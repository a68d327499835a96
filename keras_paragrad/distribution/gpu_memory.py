"""The memory size of GPUs, which TensorFlow does not report."""

import shutil
import subprocess

SECONDS = 10


def memory_by_name() -> dict[str, int]:
    """Queries `nvidia-smi` for the memory of each GPU model, in bytes.

    By model rather than index, since TensorFlow and `nvidia-smi` may number GPUs differently. Models found with
    several memory sizes are omitted.

    Returns:
        From names, as in TensorFlow's `device_name`, to bytes; empty if `nvidia-smi` is missing or doesn't answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    sizes: dict[str, set[int]] = {}
    for line in answer.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            sizes.setdefault(name.strip(), set()).add(int(mebibytes) * 2**20)
    return {name: found.pop() for name, found in sizes.items() if len(found) == 1}
