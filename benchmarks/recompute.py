"""What recomputation saves in memory and costs in time: a Transformer of 12 blocks on one device.

`python benchmarks/recompute.py` prints the tables and saves them in `results/recompute.json`.
"""

import functools
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import interleaved, report

BLOCKS, BATCH, STEPS, WIDTH, HEADS, ROUNDS = 12, 16, 256, 128, 4, 7
# By name, the arguments of `recompute`.
CASES = {
    "plain": None,
    'recompute(model, "auto")': {},
    "recompute(model, every=2)": {"every": 2},
}


def transformer(case, jit_compile):
    """The model, compiled, and a batch."""
    import keras
    import numpy as np

    from keras_paragrad import recompute

    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = hidden = keras.Input((STEPS, WIDTH))
    for index in range(BLOCKS):
        inside = keras.Input((STEPS, WIDTH))
        normalized = layers.LayerNormalization()(inside)
        mixed = inside + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)(normalized, normalized)
        wide = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(mixed))
        outputs = mixed + layers.Dropout(0.1)(layers.Dense(WIDTH)(wide))
        hidden = keras.Model(inside, outputs, name=f"block_{index}")(hidden)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile("adam", "mse", jit_compile=jit_compile)
    if CASES[case] is not None:
        recompute(model, **CASES[case])
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH, STEPS, WIDTH)).astype("float32")
    return model, x, generator.normal(size=(BATCH, 4)).astype("float32")


def print_peak(case, jit_compile, trains):
    """Runs in a process of its own: the most memory it has held, in MB."""
    model, x, y = transformer(case, jit_compile == "on")
    if trains == "yes":
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def peak(case, jit_compile, trains="yes"):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow before.
    command = [sys.executable, "-W", "ignore", __file__, case, jit_compile, trains]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return float(finished.stdout.split()[-1])


def memory():
    rows = []
    for case in CASES:
        row = [case]
        for jit_compile in ("off", "on"):
            taken = peak(case, jit_compile) - peak("plain", jit_compile, "no")
            row += [round(taken), f"{1 - taken / rows[0][len(row)]:.0%}" if rows else ""]
        rows.append(row)
    columns = ["", "jit off", "saved, jit off", "jit on", "saved, jit on"]
    report("recompute", "Peak memory above the built model, MB: Transformer of 12 blocks, batch of 16", columns, rows)


def times():
    from models import endless

    columns = ["", "step", "to plain", "CPU time", "to plain, CPU time"]
    for jit_compile in ("off", "on"):
        trained = {case: transformer(case, jit_compile == "on") for case in CASES}
        # Of all cores, which says more on a machine that others use too.
        computing = {case: [] for case in CASES}

        def step(case, trained=trained, computing=computing):
            model, *data = trained[case]
            start, computed = time.perf_counter(), time.process_time()
            # Not of arrays: the thread that tunes their pipeline sleeps, and is waited for when `fit` ends.
            model.fit(endless(*data), steps_per_epoch=1, verbose=0)
            computing[case].append((time.process_time() - computed) * 1e3)
            return (time.perf_counter() - start) * 1e3

        walls = interleaved({case: functools.partial(step, case) for case in CASES}, ROUNDS, warm_up=1)
        busy = {case: statistics.median(times[1:]) for case, times in computing.items()}
        rows = [
            [case, *(cell for times in (walls, busy) for cell in (round(times[case]), times[case] / times["plain"]))]
            for case in CASES
        ]
        title = f"Milliseconds a step, jit {jit_compile}: Transformer of 12 blocks, batch of 16, Adam"
        report("recompute", title, columns, rows)


def main():
    if sys.argv[1:]:
        print_peak(*sys.argv[1:])
        return
    memory()
    times()


if __name__ == "__main__":
    main()
