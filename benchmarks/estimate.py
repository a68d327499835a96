"""The memory that `DistributedFit.estimate` says that training takes, beside the memory that it was seen to take.

`python benchmarks/estimate.py` prints the tables and saves them in `results/estimate.json`; `python
benchmarks/estimate.py shards` does one of the sections `alone` and `shards`.
"""

import json
import os
import platform
import resource
import subprocess
import sys

import sharding
from harness import report

# Rows of a batch, by model.
BATCHES = {"MLP": 32768, "CNN": 1024, "Transformer": 32, "Transformer, recomputed": 32, "LSTM": 512}
# Freed memory goes back at once. oneDNN, which TensorFlow uses on some processors, keeps some for later.
SETTINGS = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
# By column: whether oneDNN is on, and whether XLA compiles the step.
RUNS = {"seen": ("0", ""), "seen with oneDNN": ("1", ""), "seen under XLA": ("0", "jit")}


def model_of(name, small):
    """A model and its input; a small one has the same graph, and next to no weights and activations."""
    import keras

    layers = keras.layers
    width = 8 if small else {"MLP": 1024, "CNN": 32, "LSTM": 256}.get(name, 192)
    if name == "MLP":
        inputs = keras.Input((256,))
        hidden = inputs
        for _ in range(4):
            hidden = layers.Dense(width, activation="relu")(hidden)
    elif name == "CNN":
        inputs = keras.Input((32, 32, 3))
        hidden = inputs
        for index in range(4):
            hidden = layers.Conv2D(width * 2 ** (index // 2), 3, padding="same")(hidden)
            hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
            hidden = layers.MaxPooling2D()(hidden) if index == 1 else hidden
        hidden = layers.GlobalAveragePooling2D()(hidden)
    elif name == "LSTM":
        inputs = keras.Input((100, 64))
        hidden = layers.LSTM(width)(layers.LSTM(width, return_sequences=True)(inputs))
    else:
        tokens = 8 if small else 128
        inputs = keras.Input((tokens,))
        hidden = layers.Embedding(1000, width)(inputs)
        for index in range(12):
            hidden = block(tokens, width, f"block_{index}")(hidden)
        hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def block(tokens, width, name):
    import keras

    layers = keras.layers
    inputs = keras.Input((tokens, width))
    normed = layers.LayerNormalization()(inputs)
    hidden = inputs + layers.MultiHeadAttention(4, width // 4)(normed, normed)
    inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(hidden))
    return keras.Model(inputs, hidden + layers.Dropout(0.1)(layers.Dense(width)(inner)), name=name)


def train(name, small, jit_compile):
    """Prints this process's peak memory after three steps, without the inputs, in bytes."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_paragrad import recompute

    model = model_of(name, small)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit_compile)
    if "recomputed" in name:
        recompute(model)
    rows = 8 if small else BATCHES[name]
    draw = np.random.default_rng(0)
    x = draw.uniform(size=(rows, *model.inputs[0].shape[1:])).astype("float32")
    held = x.nbytes
    data = tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(draw.integers(0, 10, rows)))).repeat(3)
    model.fit(data, verbose=0)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - held)


def estimate(name):
    """Prints the estimate for one device, in bytes, without the graph's."""
    import keras

    from keras_paragrad import DistributedFit, recompute

    model = model_of(name, small=False)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if "recomputed" in name:
        recompute(model)
    column = DistributedFit("none").estimate(model, BATCHES[name])[None]
    print(column.total - column.graph)


def estimate_shards(case):
    """Prints the estimate of a case of `sharding.py` for all its devices, in bytes, without the graph's."""
    from keras_paragrad.memory import estimate_memory

    sharding.make_devices()
    model = sharding.prepared(case, sharding.WIDTH)
    found = estimate_memory(model, sharding.BATCH, sharding.DEVICES)
    column = found[sharding.CASES[case].shard]
    print(sharding.DEVICES * (column.total - column.graph))


def in_own_process(arguments, onednn="0"):
    """The number of bytes that this script prints with these arguments in a separate process, in MB."""
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow.
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(arguments)]
    environment = {**os.environ, **SETTINGS, "TF_ENABLE_ONEDNN_OPTS": onednn, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return float(done.stdout.split()[-1]) / 1e6


def alone():
    """Reports models on one device."""
    rows = []
    for name in BATCHES:
        row = [name, round(in_own_process([name]))]
        for onednn, jit in RUNS.values():
            # XLA takes minutes to compile the others.
            if jit and name not in ("MLP", "CNN"):
                row.append("-")
                continue
            peaks = [in_own_process([name, small, bool(jit)], onednn) for small in (True, False)]
            row.append(round(peaks[1] - peaks[0]))
        rows.append([*row, f"{row[1] / row[2] - 1:+.0%}", f"{row[1] / row[3] - 1:+.0%}"])
    columns = ["", "estimated", *RUNS, "estimated against seen", "against seen with oneDNN"]
    report("estimate", "Memory of training with Adam on a CPU, MB", columns, rows)


def shards():
    """Reports the Transformer of `sharding.py` on four devices; seen is the peak of the process without its graph's."""
    rows = []
    for case, how in sharding.CASES.items():
        if not how.replicated or how.jit:
            continue
        estimated = in_own_process(["shards", case])
        peaks = [
            sharding.result(sharding.in_own_process("print_memory", case, width, **sharding.SETTINGS))["peak"] / 1e6
            for width in (sharding.WIDTH, sharding.TINY)
        ]
        seen = peaks[0] - peaks[1]
        rows.append([case, round(estimated), round(seen), f"{estimated / seen - 1:+.0%}"])
    title = f"Memory of training a Transformer on {sharding.DEVICES} devices with Adam, MB of all of them"
    report("estimate", title, ["", "estimated", "seen", "estimated against seen"], rows)


SECTIONS = {"alone": alone, "shards": shards}


def main():
    if sys.argv[1:] and sys.argv[1] not in SECTIONS:
        arguments = json.loads(sys.argv[1])
        if arguments[0] == "shards":
            estimate_shards(arguments[1])
        elif len(arguments) == 1:
            estimate(*arguments)
        else:
            train(*arguments)
        return
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()


if __name__ == "__main__":
    main()
