"""What differential privacy costs: steps of private training to plain ones, and peak memory.

`python benchmarks/privacy.py` prints the tables and saves them in `results/privacy.json`.
"""

import os
import platform
import resource
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import interleaved, report

# An update's examples, and the updates of a timed epoch. A physical batch is a quarter of the padded batch.
SIZE, UPDATES, ROUNDS = 1024, 8, 5
MODELS = ("mlp", "cnn", "transformer")
WAYS = ("plain", "wrap(clip_norm=1.0)", "make_private, one batch", "make_private, four physical batches")


def prepared(name, way, jit_compile):
    """A compiled model and the arguments of its `fit`."""
    import keras
    from models import batch_of, loss_of, model_of

    from keras_paragrad import wrap
    from keras_paragrad.privacy import make_private

    model, data = model_of(name), batch_of(name, SIZE * UPDATES)
    options = {"batch_size": SIZE}
    if way.startswith("wrap"):
        model = wrap(model, clip_norm=1.0)
    elif way != "plain":
        settings = {"clip_norm": 1.0, "expected_batch_size": SIZE, "delta": 1e-6, "noise_multiplier": 1.0}
        private = make_private(model, **settings, examples=len(data[0]))
        if way.endswith("physical batches"):
            rows, _ = private.privacy.rows()
            private = make_private(model, **settings, physical_batch_size=-(-rows // 4))
        model, options = private, {}
    model.compile(keras.optimizers.SGD(0.01), loss_of(), jit_compile=jit_compile)
    return model, data, options


def timed(name, way, jit_compile):
    model, data, options = prepared(name, way, jit_compile)

    def run():
        start = time.perf_counter()
        model.fit(*data, verbose=0, **options)
        return (time.perf_counter() - start) / UPDATES * 1e3

    return run


def steps():
    rows = []
    for name in MODELS:
        for jit_compile in (False, True):
            taken = interleaved({way: timed(name, way, jit_compile) for way in WAYS}, ROUNDS)
            ratios = [taken[way] / taken["plain"] for way in WAYS[1:]]
            rows.append([f"{name}, jit {'on' if jit_compile else 'off'}", taken["plain"], *ratios])
    columns = ["", "plain, ms", *(f"{way}, to plain" for way in WAYS[1:])]
    report("privacy", f"A step of {SIZE} examples in fit", columns, rows)


def print_peak(name, way):
    """Runs in a process of its own: the most memory it has held, in MB."""
    model, data, options = prepared(name, way, True)
    model.fit(*data, verbose=0, **options)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def peak(name, way):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow before.
    command = [sys.executable, "-W", "ignore", __file__, "peak", name, way]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return float(finished.stdout.split()[-1])


def memory():
    rows = [[name, *(round(peak(name, way)) for way in WAYS)] for name in MODELS]
    report("privacy", f"Peak memory of the process, MB, in steps of {SIZE} examples with XLA", ["", *WAYS], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        print_peak(*sys.argv[2:])
    else:
        for measure in (memory, steps):
            if not sys.argv[1:] or measure.__name__ in sys.argv[1:]:
                measure()
