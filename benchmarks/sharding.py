"""What shards save in memory and cost in time: a Transformer of 20 million parameters on four logical CPU devices.

`python benchmarks/sharding.py` prints the tables and saves them in `results/sharding.json`; `python
benchmarks/sharding.py times` does one of the sections `memory`, `times`, `largest` and `peers`. All devices share the
memory and the cores of one machine: a process's peak is the peak of all of them together, and times say what is added
to a step, not how training scales.
"""

import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import report

BENCHMARKS = Path(__file__).parent
TORCH = BENCHMARKS.parent / ".venv-peers" / "torch" / "bin" / "python"
DEVICES = 4
BLOCKS, WIDTH, HEADS, TOKENS, WORDS, BATCH = 3, 720, 8, 32, 2000, 16
# The width of a model with the same graph and next to no weights.
TINY = 8


class Case(NamedTuple):
    """How to train: `shard` of `DistributedFit`, and whether on all devices, recomputed, and by XLA."""

    replicated: bool = True
    shard: str | None = None
    recomputed: bool = False
    jit: bool = False


CASES = {
    "one device": Case(replicated=False),
    "mirrored": Case(),
    'shard="optimizer"': Case(shard="optimizer"),
    'shard="parameters"': Case(shard="parameters"),
    'shard="parameters", recomputed': Case(shard="parameters", recomputed=True),
    "mirrored, XLA": Case(jit=True),
    'shard="parameters", XLA': Case(shard="parameters", jit=True),
    'shard="parameters", recomputed, XLA': Case(shard="parameters", recomputed=True, jit=True),
}
# How many turns each case has, and how many steps a turn.
TURNS, BLOCK = 7, 2
# The most data that a process may hold, in bytes: all devices and TensorFlow together. The widest model that trains
# within it is looked for from a width by case, and to within `NARROWER`.
LIMIT = 3000e6
BEGIN = {"mirrored": 896, 'shard="parameters"': 1760, 'shard="parameters", recomputed': 1760}
NARROWER = 32
OUT_OF_MEMORY = ("ResourceExhaustedError", "MemoryError", "Cannot allocate memory", "bad_alloc")
# What is freed goes back at once, so that a peak is what was in use; oneDNN keeps some memory for later.
SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}


def transformer(width):
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = layers.Embedding(WORDS if width > TINY else TINY, width)(inputs)
    for block in range(BLOCKS):
        hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(HEADS, width // HEADS)(hidden, hidden))
        inner = layers.Dense(4 * width, activation="gelu", name=f"wide_{block}")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(width, name=f"narrow_{block}")(inner))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden)))


def make_devices():
    """Divides the CPU into logical devices."""
    # Keras loads these where they happen to be installed, 130 MB that no training needs.
    sys.modules.update(dict.fromkeys(("pandas", "sklearn")))
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)


def prepared(case, width):
    """A case's compiled model, prepared so that `model.fit` trains it as the case says."""
    import keras

    from keras_paragrad import DistributedFit, recompute

    replicated, shard, recomputed, jit = CASES[case]
    devices = [f"CPU:{index}" for index in range(DEVICES)]
    dist = DistributedFit("mirrored", devices, shard=shard, jit=jit) if replicated else None
    with dist.scope() if dist else contextlib.nullcontext():
        model = transformer(width)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    if recomputed:
        recompute(model, every=1)
    if dist:
        dist.prepare(model)
    return model


def fit(model, steps, *callbacks):
    import numpy as np
    from models import endless

    x = np.random.default_rng(0).integers(0, TINY, (BATCH, TOKENS))
    data = endless(x, np.arange(BATCH) % 4)
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks))


def held(model):
    """Bytes of weights and of the optimizer's state on a device, counted from the variables."""
    import tensorflow as tf

    from keras_paragrad.storage.sharded import sharded_value

    total = 0
    for variable in (*model.variables, *model.optimizer.variables):
        storage, size = sharded_value(variable), tf.as_dtype(variable.dtype).size
        if storage is None or storage.copies is not None:
            total += math.prod(variable.shape) * size
        if storage is not None:
            total += storage.partition.size * size
    return total


def print_memory(case, width):
    """Runs in a separate process; prints its number of parameters, what a device holds, and the peak memory."""
    make_devices()
    model = prepared(case, int(width))
    fit(model, 4)
    unit = 1 if platform.system() == "Darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"parameters": model.count_params(), "held": held(model), "peak": peak}))


def print_fits(case, width):
    """Runs in a separate process; prints the number of parameters if a model trains under the limit, or else fails."""
    # `RLIMIT_AS` would count mapped libraries too, and memory that is only reserved.
    resource.setrlimit(resource.RLIMIT_DATA, (int(LIMIT), int(LIMIT)))
    make_devices()
    model = prepared(case, int(width))
    fit(model, 4)
    print(json.dumps({"parameters": model.count_params()}))


def print_times():
    """Runs in a separate process; prints, by case, the microseconds of a step in each turn."""
    from interleave import in_turns

    make_devices()

    def training(case):
        return lambda turn, steps: fit(prepared(case, WIDTH), steps, turn)

    taken = in_turns({case: training(case) for case in CASES}, TURNS, BLOCK)
    print(json.dumps({case: list(times) for case, times in taken.items()}))


def in_own_process(*arguments, script=__file__, **environment):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow.
    command = [sys.executable, "-W", "ignore", script, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)


def result(done):
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def memory():
    """Reports what a device holds and the peak of the process, each also to another case's."""
    found = {
        case: [result(in_own_process("print_memory", case, width, **SETTINGS)) for width in (WIDTH, TINY)]
        for case in CASES
    }
    alone, mirrored = found["one device"][0]["held"], [each["peak"] for each in found["mirrored"]]
    rows = [
        [
            case,
            round(full["held"] / 1e6),
            full["held"] / alone,
            round(full["peak"] / 1e6),
            full["peak"] / mirrored[0],
            round((full["peak"] - tiny["peak"]) / 1e6),
            (full["peak"] - tiny["peak"]) / (mirrored[0] - mirrored[1]),
        ]
        for case, (full, tiny) in found.items()
    ]
    columns = ["", "held by a device", "of one device's", "peak", "of mirrored's"]
    columns += ["peak above the graph", "of mirrored's above the graph"]
    millions = found["mirrored"][0]["parameters"] / 1e6
    title = f"Memory of training a Transformer of {millions:.1f} million parameters on {DEVICES} devices, Adam, MB"
    report("sharding", title, columns, rows)


def times():
    """Reports the time of a step, and its median ratio to the mirrored one of the same turn."""
    taken = result(in_own_process("print_times"))
    rows = []
    for case, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken["mirrored"], strict=True))
        rows.append([case, round(statistics.median(times) / 1e3), ratio])
    report("sharding", f"Milliseconds a step, batch of {BATCH} x {TOKENS}", ["", "step", "to mirrored"], rows)


def widest(case):
    """The width of the widest model that trains under the limit, to within `NARROWER`, and its number of parameters."""
    # By width: numbers of parameters, and exit statuses.
    trained, failed = {}, {}
    width = BEGIN[case]
    while not (trained and failed and min(failed) - max(trained) <= NARROWER):
        done = in_own_process("print_fits", case, width, **SETTINGS)
        if done.returncode:
            # A crash, with a negative status, is for want of memory too: some of TensorFlow doesn't check for it.
            if done.returncode > 0 and not any(each in done.stderr for each in OUT_OF_MEMORY):
                raise RuntimeError(done.stderr[-2000:])
            failed[width] = done.returncode
        else:
            trained[width] = result(done)["parameters"]
        print(f"{case}, {width} wide: {'fails' if done.returncode else 'trains'}", file=sys.stderr, flush=True)
        # In ever larger steps until one width trains and one fails, and then halfway between.
        if trained and failed:
            width = (max(trained) + min(failed)) // 2 // NARROWER * NARROWER
        else:
            width += NARROWER * 2 ** (len(trained) + len(failed) - 1) * (1 if trained else -1)
    return max(trained), trained[max(trained)]


def largest():
    """Reports the widest models that train under the limit."""
    if platform.system() != "Linux":
        print("Only Linux holds a process to a limit of its data.")
        return
    found = {case: widest(case) for case in BEGIN}
    least = found["mirrored"][1]
    rows = [[case, width, parameters / 1e6, parameters / least] for case, (width, parameters) in found.items()]
    title = f"The largest Transformer that trains with {LIMIT / 1e6:.0f} MB of data in a process of {DEVICES} devices"
    report("sharding", title, ["", "width", "million parameters", "to mirrored"], rows)


def of_peer(way, width, **environment):
    """What a way of training in PyTorch prints in a separate process, with the model of this width."""
    command = [TORCH, "-W", "ignore", "-m", "peers.sharding_torch", way]
    command += [WORDS if width > TINY else TINY, width, BLOCKS, HEADS, BATCH, TOKENS]
    settings = {"env": {**os.environ, **environment}, "cwd": BENCHMARKS, "capture_output": True, "text": True}
    return result(subprocess.run(list(map(str, command)), **settings, timeout=900))


def peers():
    """Reports PyTorch's shards, in processes whose peaks are added up."""
    if not TORCH.exists():
        print("Without torch, which is not installed: make bench-peers")
        return
    rows = []
    for way in ("one process", "DDP", "FSDP"):
        full, tiny = (of_peer(way, width, **SETTINGS) for width in (WIDTH, TINY))
        # Timed without `SETTINGS`, as steps are faster if freed memory is kept for later.
        step = round(of_peer(way, WIDTH)["step"])
        rows.append(
            [way, *(round(each / 1e6) for each in (full["held"], full["peak"], full["peak"] - tiny["peak"])), step]
        )
    title = f"PyTorch on {DEVICES} gloo processes: MB of one and of all processes, and milliseconds a step"
    columns = ["", "held by a process", "peak of all", "above tiny layers", "step"]
    columns += ["peak above tiny layers, of DDP's", "step, of DDP's"]
    rows = [[*row, row[3] / rows[1][3], row[4] / rows[1][4]] for row in rows]
    report("sharding", title, columns, rows)


SECTIONS = {"memory": memory, "times": times, "largest": largest, "peers": peers}


def main():
    if sys.argv[1:] and sys.argv[1] not in SECTIONS:
        {"print_memory": print_memory, "print_fits": print_fits, "print_times": print_times}[sys.argv[1]](*sys.argv[2:])
        return
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()


if __name__ == "__main__":
    main()
