"""What a mesh costs in time, and saves in memory: the Transformer of `sharding.py` on four logical CPU devices.

`python benchmarks/mesh.py` prints the tables and saves them in `results/mesh.json`. The same layout is trained by
Keras on JAX on four devices of its own, if JAX is installed (`make bench-peers`): there, too, all devices share the
processor, and a step is compared with a step of one device in the same process.
"""

import functools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from harness import interleaved, report
from sharding import BATCH, DEVICES, TOKENS, WIDTH, fit, in_own_process, make_devices, prepared, result, transformer

BENCHMARKS = Path(__file__).parent
JAX = BENCHMARKS.parent / ".venv-peers" / "jax" / "bin" / "python"
ALONE = "one device"
MESHES = {"(4, 1)": (4, 1), "(2, 2)": (2, 2), "(1, 4)": (1, 4)}
ROUNDS, STEPS = 5, 4


def distribution(shape):
    """Keras's distribution of the Transformer: attention by heads, Dense layers by columns and then by rows."""
    import keras

    devices = keras.distribution.list_devices("cpu")[:DEVICES]
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ["batch", "model"], devices))
    layout[".*embeddings"] = (None, "model")
    layout[".*(query|key|value)/kernel"] = (None, "model", None)
    layout[".*(query|key|value)/bias"] = ("model", None)
    layout[".*attention_output/kernel"] = ("model", None, None)
    layout[".*wide_[0-9]+/kernel"] = (None, "model")
    layout[".*wide_[0-9]+/bias"] = ("model",)
    layout[".*narrow_[0-9]+/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def batches(steps):
    """Arrays of a number of batches."""
    import numpy as np

    rows = BATCH * steps
    return np.random.default_rng(0).integers(0, 8, (rows, TOKENS)), np.arange(rows) % 4


def timed(train):
    """A case for `interleaved`: milliseconds per step of a function that takes `STEPS` of them."""

    def run():
        start = time.perf_counter()
        train()
        return (time.perf_counter() - start) / STEPS * 1e3

    return run


def loss():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def on_mesh(shape, jit):
    """A Transformer that is prepared to be trained on a mesh by its own `fit`."""
    from keras_paragrad import DistributedFit

    dist = DistributedFit(distribution(shape))
    with dist.scope():
        model = transformer(WIDTH)
        model.compile("adam", loss(), jit_compile=jit)
    dist.prepare(model)
    return model


def alone(jit):
    model = transformer(WIDTH)
    model.compile("adam", loss(), jit_compile=jit)
    return model


def print_times(kind):
    """Runs in a separate process; prints milliseconds per step by case: one device, and `"mirrored"` or `"meshes"`."""
    make_devices()
    cases = {ALONE: alone(False)}
    if kind == "mirrored":
        cases["mirrored"] = prepared("mirrored", WIDTH)
    else:
        cases[f"{ALONE}, XLA"] = alone(True)
        for name, shape in MESHES.items():
            cases[name] = on_mesh(shape, False)
            cases[f"{name}, XLA"] = on_mesh(shape, True)
    # `sharding.fit` feeds a dataset: `fit` of arrays would wait at its end for a thread that sleeps.
    trainings = {name: timed(functools.partial(fit, model, STEPS)) for name, model in cases.items()}
    print(json.dumps(interleaved(trainings, ROUNDS)))


def print_held(name):
    """Runs in a separate process; prints the bytes of weights and Adam's moments on the fullest device, and in all."""
    make_devices()
    from keras_paragrad.engine.mesh.running import variables_on_mesh
    from keras_paragrad.storage.dtensor import bytes_by_device

    model = on_mesh(MESHES[name], False)
    model.fit(*batches(1), batch_size=BATCH, verbose=0)
    held = {}
    for _, storage in variables_on_mesh(model):
        for device, count in bytes_by_device(storage).items():
            held[device] = held.get(device, 0) + count
    whole = sum(math.prod(each.shape) * 4 for each in (*model.variables, *model.optimizer.variables))
    print(json.dumps({"held": max(held.values()), "whole": whole}))


def times():
    """Reports the time of a step on each mesh, to one device's and to the one on replicas."""
    # Once a process has computed on a mesh, replicas in it take twice as long. So they run in separate processes, and
    # are compared by the time of one device in each.
    replicas, taken = (result(in_own_process("print_times", kind, script=__file__)) for kind in ("mirrored", "meshes"))
    mirrored = replicas["mirrored"] / replicas[ALONE]
    rows = [["mirrored", round(replicas["mirrored"]), mirrored, 1.0]]
    for name, step in taken.items():
        to_one = step / taken[f"{ALONE}, XLA" if name.endswith("XLA") else ALONE]
        rows.append([name, round(step), to_one, step / taken[ALONE] / mirrored])
    columns = ["", "step", "to one device", "to mirrored"]
    report("mesh", f"Milliseconds a step on {DEVICES} devices, batch of {BATCH} x {TOKENS}", columns, rows)


def held():
    """Reports what the fullest device of each mesh holds."""
    found = {name: result(in_own_process("print_held", name, script=__file__)) for name in MESHES}
    rows = [[name, round(each["held"] / 1e6), each["held"] / each["whole"]] for name, each in found.items()]
    report("mesh", "MB of weights and optimizer state on a device", ["", "held", "of one device's"], rows)


def peers():
    """Reports the times of the same layouts in Keras on JAX."""
    if not JAX.exists():
        print("Without JAX, which is not installed: make bench-peers")
        return
    command = [str(JAX), "-W", "ignore", "-m", "peers.mesh_jax"]
    taken = result(subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=1800))
    rows = [[name, round(step), step / taken[ALONE]] for name, step in taken.items()]
    report("mesh", "Keras on JAX, milliseconds a step", ["", "step", "to one device"], rows)


SECTIONS = {"times": times, "held": held, "peers": peers}


def main():
    if sys.argv[1:] and sys.argv[1] not in SECTIONS:
        {"print_times": print_times, "print_held": print_held}[sys.argv[1]](*sys.argv[2:])
        return
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()


if __name__ == "__main__":
    main()
