"""The output of `doctor`: versions, detected hardware, the plan for it, and whether a collective works."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

import keras_paragrad
import keras_paragrad.compat
from keras_paragrad.distribution.cluster import sources_in_words
from keras_paragrad.distribution.hardware import Device, Hardware, detect
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import Explanation, make_plan
from keras_paragrad.plain_text import show

# The size of the array that each replica adds, and the number of timed runs after the first.
NUMBERS = 2**20
REPEATS = 10


def probed_devices(hardware: Hardware) -> tuple[str, ...]:
    """The local GPUs if there are several, else all logical CPU devices, and at least two."""
    gpus = tuple(device.name for device in hardware.of_kind("GPU"))
    return gpus if len(gpus) > 1 else tuple(f"CPU:{index}" for index in range(max(2, len(hardware.of_kind("CPU")))))


def run_probe(devices: tuple[str, ...], seconds: float) -> tuple[bool, str]:
    """All-reduces known numbers over the devices, in a subprocess with a timeout."""
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-m", "keras_paragrad.distribution.diagnosis", *devices]
    # The subprocess must not join this process's cluster.
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False, f"did not finish within {seconds:g} s, and was killed"
    if result.returncode:
        return False, f"failed with exit status {result.returncode}: {result.stderr.strip()[-600:]}"
    return check_sums(len(devices), json.loads(result.stdout.splitlines()[-1]))


def check_sums(count: int, answer: Mapping[str, Any]) -> tuple[bool, str]:
    """Compares the sums in the answer of `reduce_known_numbers` with the sum of the replicas' numbers, 1, 2, 3..."""
    expected = count * (count + 1) / 2
    if answer["least_and_most"] != [[expected, expected]] * count:
        return False, f"gave wrong sums: {answer['least_and_most']} on the replicas, instead of {expected:g}"
    took = f"{answer['milliseconds']:.2f} ms for {NUMBERS * 4 / 2**20:g} MiB, the median of {REPEATS} runs"
    return True, f"gave the right sum, {expected:g}: {took}"


def reduce_known_numbers(devices: tuple[str, ...]) -> dict[str, Any]:
    """Times the all-reduce in this process: replica `i` holds an array filled with `i + 1`."""
    strategy = tf.distribute.MirroredStrategy(list(devices))

    def in_replica(ones: tf.Tensor):
        context = tf.distribute.get_replica_context()
        known = ones * (tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, known)

    @tf.function(autograph=False)
    def reduce(ones: tf.Tensor):
        return strategy.run(in_replica, args=(ones,))

    seconds, sums = [], None
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        sums = [part.numpy() for part in strategy.experimental_local_results(reduce(tf.ones([NUMBERS])))]
        seconds.append(time.perf_counter() - start)
    least_and_most = [[float(part.min()), float(part.max())] for part in sums or []]
    return {"least_and_most": least_and_most, "milliseconds": statistics.median(seconds[1:]) * 1e3}


def main(devices: tuple[str, ...]) -> None:
    """Creates the logical devices, runs the all-reduce, and prints the result as JSON."""
    cpus = [name for name in devices if name.startswith("CPU:")]
    if cpus:
        configurations = [tf.config.LogicalDeviceConfiguration()] * len(cpus)
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], configurations)
    print(json.dumps(reduce_known_numbers(devices)))


def diagnose(seconds: float, say: Callable[[str], None]) -> int:
    """Prints versions, hardware, plan and probe; returns the exit status, 1 for any problem."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    backend = f"{keras.__version__}, on {keras.backend.backend()}"
    versions = [("tensorflow", tf.__version__), ("keras", backend), ("keras_paragrad", keras_paragrad.__version__)]
    _print_pairs("Versions", [("Python", python), *versions])
    say("looking for devices")
    try:
        hardware = detect()
    except ValueError as error:
        print(f"\nThe cluster description in the environment is malformed: {error}")
        return 1
    _print_pairs("Found", _describe(hardware))
    planned = True
    try:
        plan = make_plan(hardware, Options())
    except ValueError as error:
        planned = False
        print(f"\nDistributedFit() would refuse: {error}")
    else:
        show(Explanation(plan, hardware))
    devices = probed_devices(hardware)
    say(f"trying an all-reduce over {', '.join(devices)}, for at most {seconds:g} s")
    works, outcome = run_probe(devices, seconds)
    print(f"An all-reduce over {', '.join(devices)} {outcome}.")
    return 0 if planned and works else 1


def _describe(hardware: Hardware) -> list[tuple[str, str]]:
    """The hardware as rows of names and values."""
    rows = [
        ("processors", str(hardware.cpu_count)),
        ("memory", _gibibytes(hardware.memory_bytes)),
        ("logical devices", ", ".join(device.name for device in hardware.devices)),
        ("GPUs", "; ".join(_in_words(gpu) for gpu in hardware.gpus) or "none"),
    ]
    cluster = hardware.cluster
    if cluster is None:
        return [*rows, ("cluster", f"none: no {sources_in_words()} variables")]
    tasks = "; ".join(f"{job} {', '.join(hosts)}" for job, hosts in cluster.jobs.items())
    return [*rows, ("cluster", f"from {cluster.source}: {tasks}"), ("this task", f"{cluster.job} {cluster.index}")]


def _in_words(device: Device) -> str:
    capability = device.compute_capability
    parts = [f"{device.name} {device.description}".strip(), _gibibytes(device.memory_bytes)]
    return ", ".join([*parts, f"compute capability {capability[0]}.{capability[1]}"] if capability else parts)


def _gibibytes(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _print_pairs(title: str, pairs: list[tuple[str, str]]) -> None:
    print(title)
    for name, value in pairs:
        print(f"  {name.ljust(max(len(name) for name, _ in pairs))}  {value}")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
