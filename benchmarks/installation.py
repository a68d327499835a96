"""Seconds from an empty environment to the end of README's first script, on pairs of releases of Keras and TensorFlow.

`python benchmarks/installation.py 3.10-2.19` downloads the wheel in `dist/` and all that the pair needs, without pip's
cache, installs that without the network, and runs the script, which has to print `12 updates`. It saves the time
that each step took in `results/installation.json`. Without a pair, it measures all.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from releases import PAIRS, ROOT, install, parsed, versions_in

SAVED = ROOT / "benchmarks" / "results" / "installation.json"
LAST_LINE = "12 updates"


def measured(pair, folder):
    """The releases of a pair, the time of each step, and the bytes downloaded and installed."""
    environment, downloads, script = (folder / name for name in ("environment", "downloads", "first.py"))
    script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0])
    (wheel,) = (ROOT / "dist").glob("*.whl")
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    download = ("download", "--no-cache-dir", "--only-binary=:all:", "-d", downloads)
    steps = {
        "download": functools.partial(install, python, pair, wheel, command=download),
        "install": functools.partial(
            install, python, pair, wheel, command=("install", "--no-index", "--find-links", downloads)
        ),
        "script": functools.partial(trained, python, script),
    }
    taken = {name: timed(step) for name, step in steps.items()}
    return {**versions_in(python), **taken, "bytes": {"download": size(downloads), "install": size(environment)}}


def trained(python, script):
    """Runs README's first script, which has to end with `LAST_LINE`."""
    run = subprocess.run([python, "-P", script], cwd=script.parent, capture_output=True, text=True, check=False)
    if run.returncode or run.stdout.strip().splitlines()[-1] != LAST_LINE:
        raise SystemExit(f"{run.stdout[-2000:]}{run.stderr[-2000:]}")


def timed(step):
    """Runs a step; returns its wall time, and the processor time of the processes that it has started, in seconds."""
    start, before = time.perf_counter(), os.times()
    step()
    after = os.times()
    processors = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.perf_counter() - start, "processor seconds": processors}


def size(folder):
    """The bytes of the files in a folder."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def main():
    arguments = parsed(argparse.ArgumentParser(description=__doc__))
    saved = json.loads(SAVED.read_text()) if SAVED.exists() else {}
    for pair in arguments.pairs:
        with tempfile.TemporaryDirectory() as folder:
            saved[pair] = measured(pair, Path(folder))
        print(f"{pair}: {saved[pair]}", flush=True)
        SAVED.write_text(json.dumps({each: saved[each] for each in PAIRS if each in saved}, indent=1) + "\n")


if __name__ == "__main__":
    main()
