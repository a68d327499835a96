"""Runs every benchmark; `make bench` calls it. Each prints its tables and saves them in `results/`."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "exactness",
    "accumulation",
    "memory",
    "estimate",
    "recompute",
    "contrastive",
    "custom_steps",
    "sharding",
    "mesh",
    "pipeline",
    "per_example",
    "privacy",
    "input_gradients",
    "distribution",
    "profiling",
    "leaks",
)

if __name__ == "__main__":
    for name in BENCHMARKS:
        subprocess.run([sys.executable, "-W", "ignore", Path(__file__).with_name(f"{name}.py")], check=True)
