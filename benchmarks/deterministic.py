"""What the same bits on any number of devices cost: a step with `deterministic=8`, to the same step without.

`python benchmarks/deterministic.py` prints the table and saves it in `results/deterministic.json`. Each case is
measured in separate processes, by turns, as determinism is a setting of the whole process.
"""

import itertools
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from harness import report

MODELS = {"mlp": "MLP 784-512-512-10", "cnn": "CNN of two convolutions", "transformer": "Transformer of one block"}
REPLICAS, PARTS = (1, 2), (0, 8)
BATCH, STEPS, TURNS = 128, 60, 3


def print_step(name: str, replicas: int, parts: int) -> None:
    """Runs in a separate process; prints the median of the milliseconds between the ends of two steps.

    `parts` is the value of `deterministic`, 0 for without.
    """
    import keras
    import numpy as np
    import tensorflow as tf
    from models import endless, model_of
    from sizes import TOKENS, WORDS

    from keras_paragrad import DistributedFit

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    devices = [f"CPU:{index}" for index in range(replicas)]
    options = {"deterministic": parts or False, "jit": False}
    dist = DistributedFit("mirrored", devices, **options) if replicas > 1 else DistributedFit("none", **options)
    with dist.scope():
        model = model_of(name)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    draw, shape = np.random.default_rng(0), {"mlp": (784,), "cnn": (28, 28, 1), "transformer": (TOKENS,)}[name]
    words = draw.integers(0, WORDS, (BATCH, *shape)).astype("int32")
    x = words if name == "transformer" else draw.normal(size=(BATCH, *shape)).astype("float32")
    data = endless(x, draw.integers(0, 10, BATCH))
    dist.fit(model, data, steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
    # The first steps trace, and the input pipeline fills.
    print(1e3 * statistics.median(late - early for early, late in itertools.pairwise(ends[10:])))


def measure(*case: object) -> float:
    """Milliseconds a step of a case."""
    command = [sys.executable, "-W", "ignore", __file__, *map(str, case)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    """Measures all cases by turns, and reports medians."""
    cases = list(itertools.product(MODELS, REPLICAS, PARTS))
    taken = {case: [] for case in cases}
    for _ in range(TURNS):
        for case in cases:
            taken[case].append(measure(*case))
    medians = {case: statistics.median(values) for case, values in taken.items()}
    rows = []
    for name, replicas in itertools.product(MODELS, REPLICAS):
        plain, same_bits = (medians[name, replicas, parts] for parts in PARTS)
        where = "1 device" if replicas == 1 else f"{replicas} replicas"
        rows.append([f"{MODELS[name]}, {where}", plain, same_bits, same_bits / plain])
    columns = ["", "ms a step", "deterministic=8", "ratio"]
    report("deterministic", f"Milliseconds a step, batches of {BATCH}, without XLA", columns, rows)


if __name__ == "__main__":
    if sys.argv[1:]:
        print_step(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main()
