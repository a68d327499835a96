"""What holds on a GPU: whether steps are right, how fast they are, what they take, and what the tools see of them.

`python benchmarks/gpu.py`, or `make gpu`, runs for twenty minutes at most, prints each line once it is known, and adds
it to `results/gpu.json`; at the end it writes `docs/benchmarks/gpu.md` from that. It needs the package, a GPU build of
TensorFlow and NumPy, and the extras `privacy` and `profile` for the lines of those. The exit status is 1 if a line
failed or there was no time for it, and 2 without a GPU.
"""

import argparse
import ctypes
import datetime
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from gpu_parts import saved
from gpu_parts.case import PASSED, Line
from gpu_parts.running import Part, Runner

SECONDS = 1200
RIGHT = ("accumulation", "slices", "models", "examples", "clipped", "inputs", "private", "precision", "tf32")
# The large model, a Transformer of 12 blocks, comes last, as XLA takes long to compile it.
FAST = ("accumulation", "examples", "telemetry", "jax", "torch", "transformer")
# In order of worth.
PARTS = {
    "found": Part(
        "the hardware, `doctor`, the plan, and its choices beside what a step measures", ("gpu_parts.found",), 0.12
    ),
    "right": Part(
        "steps against whole batches and loops over examples on the same GPU, TensorFloat-32 off and on",
        tuple(f"gpu_parts.right_{name}" for name in RIGHT),
        0.3,
        parallel=True,
    ),
    "devices": Part("two devices, logical ones if there is one card: exact, or refused", ("gpu_parts.devices",), 0.18),
    "fast": Part(
        "times to those of the plain step, medians by turns",
        tuple(f"gpu_parts.fast_{name}" for name in FAST),
        0.26,
    ),
    "memory": Part("the peak of the device, beside the estimate", ("gpu_parts.memory",), 0.09),
    "seen": Part("what `Profiler` and `Throughput` see", ("gpu_parts.seen",), 0.05),
}
# What TensorFlow loads, by the major versions that its wheels are built for.
LIBRARIES = (
    *("libcuda.so.1", "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11"),
    *("libcusolver.so.11", "libcusparse.so.12", "libcudnn.so.9", "libnccl.so.2"),
)


def main(words: list[str] | None = None, parts: dict[str, Part] = PARTS) -> int:
    """Runs the parts and returns the exit status."""
    arguments = parsed(words, parts)
    if arguments.list:
        for name, part in parts.items():
            print(f"{name:8} {part.shows}")
        return 0
    if arguments.docs:
        saved.write_docs(saved.read(saved.RESULTS), {name: part.shows for name, part in parts.items()})
        return 0
    if not arguments.cpu and not has_gpu():
        return 2
    # On CPUs, nothing is saved without `--output`.
    path = arguments.output or (None if arguments.cpu else saved.RESULTS)
    failed = run(arguments, parts, path)
    if path == saved.RESULTS and parts is PARTS:
        saved.write_docs(saved.read(path), {name: part.shows for name, part in parts.items()})
    return int(failed)


def run(arguments: argparse.Namespace, parts: dict[str, Part], path: Path | None) -> bool:
    """Runs the parts, prints a line for each case and saves it, and returns whether any failed or could not be run."""
    results = saved.Results(path, datetime.date.today().isoformat())
    lock, outcomes = threading.Lock(), []

    def show(part: str, name: str, line: Line) -> None:
        with lock:
            outcomes.append(line.outcome)
            results.add(part, name, line)
            print(f"{part:8} {line.outcome:9} {name}: {line.text} [{line.seconds:g} s]", flush=True)

    # Called once it is known which machine this is.
    def meet(machine: dict) -> None:
        with lock:
            results.meet(machine)

    chosen = {name: part for name, part in parts.items() if name in (arguments.only or parts)}
    began = time.monotonic()
    processes = 2 if arguments.cpu else max(1, min(5, (os.cpu_count() or 1) // 3))
    runner = Runner(
        arguments.cpu, arguments.every or not arguments.cpu, show, meet, began + arguments.seconds, processes
    )
    runner.run(chosen)
    passed = sum(each in PASSED for each in outcomes)
    print(f"{passed} of {len(outcomes)} lines passed, in {time.monotonic() - began:.0f} s.")
    return passed < len(outcomes)


def parsed(words: list[str] | None, parts: dict[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=parts, metavar="PART", help="run this part; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time of all parts together ({SECONDS})")
    parser.add_argument("--cpu", action="store_true", help="run all parts small, on CPUs; saves only to --output")
    parser.add_argument("--every", action="store_true", help="with --cpu, every variant of each case: takes minutes")
    parser.add_argument("--output", type=Path, help="the JSON file (benchmarks/results/gpu.json)")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--docs", action="store_true", help="only write the documentation from the JSON")
    return parser.parse_args(words)


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU; if not, prints what it may have missed."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        if pool.apply(gpu_count):
            return True
    missing = [name for name in LIBRARIES if not can_load(name)]
    print("TensorFlow sees no GPU. --cpu runs all parts small, on CPUs.", file=sys.stderr)
    if missing:
        print(f"Libraries that can't be loaded here: {', '.join(missing)}.", file=sys.stderr)
    print("TensorFlow's GPU build: pip install 'tensorflow[and-cuda]'", file=sys.stderr)
    return False


def gpu_count() -> int:
    """The number of GPUs that TensorFlow sees; runs in a separate process."""
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def can_load(library: str) -> bool:
    """Whether the loader finds a library, or one of NVIDIA's wheels has it, where TensorFlow looks too."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return any(next(Path(folder, "nvidia").glob(f"*/lib/{library}"), None) for folder in sys.path if folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
