"""The memory that a process keeps of each model that it has made, trained and released, as a tuner's loop does.

`python benchmarks/leaks.py` prints the table and saves it in `results/leaks.json`. Each case trains 100 models in a
process of its own, with `clear_session()` and a garbage collection after each.
"""

import json
import subprocess
import sys

import numpy as np
from harness import report

MODELS, WARM_UP, LIMIT = 100, 20, 0.3
OURS = ("AccumulatingOptimizer", "wrap", "GradientTelemetry", "microbatch", "DistributedFit", "per_example_norms")
CASES = ("Keras alone", *OURS)


def train(case):
    """Makes one small model and trains it for four batches."""
    import keras

    import keras_paragrad as ours

    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    y = x[:, :1].copy()
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    if case == "per_example_norms":
        ours.per_example_norms(model, x, y, "mse")
        return
    if case == "wrap":
        model = ours.wrap(model)
    model.compile(ours.AccumulatingOptimizer("adam", 2) if case == "AccumulatingOptimizer" else "adam", "mse")
    if case == "microbatch":
        ours.microbatch(model, 8)
    callbacks = {"GradientTelemetry": ours.GradientTelemetry, "AccumulatingOptimizer": ours.ExactAccumulation}
    options = {"batch_size": 16, "verbose": 0, "callbacks": [callbacks[case]()] if case in callbacks else []}
    if case == "DistributedFit":
        ours.DistributedFit().fit(model, x, y, **options)
    else:
        model.fit(x, y, **options)


def print_growth(case):
    """Runs in a separate process; prints by how many MB its resident memory grows with each model."""
    import gc

    import keras
    import psutil

    held = []
    for _ in range(MODELS):
        train(case)
        keras.backend.clear_session()
        gc.collect()
        held.append(psutil.Process().memory_info().rss / 1e6)
    slope = np.polyfit(np.arange(WARM_UP, MODELS), held[WARM_UP:], 1)[0]
    print(json.dumps({"mb_per_model": round(float(slope), 3), "mb_at_the_end": round(held[-1])}))


def measured(case):
    command = [sys.executable, "-W", "ignore", __file__, "--case", case]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print_growth(sys.argv[2])
    else:
        growth = {case: measured(case) for case in CASES}
        rows = [(case, *found.values()) for case, found in growth.items()]
        report("leaks", f"What a process keeps of each of {MODELS} models", ["", "MB a model", "MB at the end"], rows)
        if grown := [case for case in OURS if growth[case]["mb_per_model"] > LIMIT]:
            raise SystemExit(f"More than {LIMIT} MB a model: {', '.join(grown)}")
