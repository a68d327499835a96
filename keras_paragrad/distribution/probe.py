"""Tests whether a collective works here: an all-reduce of known numbers, in a separate process."""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_paragrad.distribution.hardware import Hardware

NUMBERS = 2**20
REPEATS = 10


@dataclass(frozen=True)
class Probe:
    """Result of a test all-reduce.

    Attributes:
        works: Whether every replica got the right sum.
        devices: The participating devices.
        says: The outcome in a sentence.
    """

    works: bool
    devices: tuple[str, ...]
    says: str


def probed_devices(hardware: Hardware) -> tuple[str, ...]:
    """The local GPUs if there are several, else two logical CPU devices."""
    gpus = tuple(device.name for device in hardware.of_kind("GPU"))
    return gpus if len(gpus) > 1 else tuple(f"CPU:{index}" for index in range(max(2, len(hardware.of_kind("CPU")))))


def run_probe(devices: tuple[str, ...], seconds: float) -> Probe:
    """All-reduces known numbers over the devices, in a process with a time limit."""
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-m", "keras_paragrad.distribution.probe", *devices]
    # In a cluster, this process must not join the others.
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Probe(False, devices, f"did not finish within {seconds:g} s, and was killed")
    if done.returncode:
        return Probe(False, devices, f"failed with exit status {done.returncode}: {done.stderr.strip()[-600:]}")
    return judge(devices, json.loads(done.stdout.splitlines()[-1]))


def judge(devices: tuple[str, ...], answer: dict[str, Any]) -> Probe:
    """Compares the replicas' results with the sum of 1, 2, 3..., which the replicas hold."""
    expected = len(devices) * (len(devices) + 1) / 2
    got = [tuple(pair) for pair in answer["least_and_most"]]
    if got != [(expected, expected)] * len(devices):
        return Probe(False, devices, f"gave wrong sums: minimum and maximum per replica {got}, instead of {expected:g}")
    size = f"{NUMBERS * 4 / 2**20:g} MiB"
    says = f"gave the right sum, {expected:g}: {answer['milliseconds']:.2f} ms for {size}, the median of {REPEATS} runs"
    return Probe(True, devices, f"{says}; the first took {answer['first_seconds']:.2f} s")


def reduce_known_numbers(devices: tuple[str, ...]) -> dict[str, Any]:
    """Runs the all-reduce in this process: replica `i` holds an array filled with `i + 1`."""
    strategy = tf.distribute.MirroredStrategy(list(devices))

    def in_replica(ones):
        context = tf.distribute.get_replica_context()
        known = ones * (tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, known)

    @tf.function(autograph=False)
    def reduce(ones):
        return strategy.run(in_replica, args=(ones,))

    seconds, sums = [], None
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        sums = [part.numpy() for part in strategy.experimental_local_results(reduce(tf.ones([NUMBERS])))]
        seconds.append(time.perf_counter() - start)
    return {
        "least_and_most": [[float(part.min()), float(part.max())] for part in sums or []],
        "first_seconds": seconds[0],
        "milliseconds": statistics.median(seconds[1:]) * 1e3,
    }


def main(devices: tuple[str, ...]) -> None:
    """Creates the logical devices, runs the all-reduce, and prints the result as JSON."""
    cpus = [name for name in devices if name.startswith("CPU:")]
    if cpus:
        parts = [tf.config.LogicalDeviceConfiguration()] * len(cpus)
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    print(json.dumps(reduce_known_numbers(devices)))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
