"""How much memory GPUs have, which TensorFlow does not tell."""

import shutil
import subprocess

SECONDS = 10


def memory_by_name() -> dict[str, int]:
    """Asks `nvidia-smi` for the memory of each model of GPU, in bytes.

    By model and not by number, since TensorFlow and `nvidia-smi` may count GPUs differently. A model that comes with
    several sizes is left out.

    Returns:
        Names as TensorFlow's `device_name`, and bytes; nothing where there is no `nvidia-smi` or it doesn't answer.
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
