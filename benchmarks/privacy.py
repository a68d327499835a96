"""What differential privacy costs: steps of private training to plain ones, memory, and accuracy.

`python benchmarks/privacy.py` prints the tables and saves them in `results/privacy.json`; `python benchmarks/privacy.py
times memory` those parts alone, of `times`, `sizes`, `low_rank`, `memory`, `peers` and `accuracy`. Peers are measured
where `make bench-peers` has installed them. `accuracy` trains for some minutes for each epsilon, or for those given, as
in `python benchmarks/privacy.py accuracy 1 3 none`; `none` is without privacy.
"""

import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import RESULTS, fashion_mnist, report
from peers.ratios import in_plain

PEERS = Path(__file__).parents[1] / ".venv-peers"
# An update's examples, the updates of an epoch, and the epochs of a timed fit. A physical batch is a quarter of what
# an update usually draws.
SIZE, UPDATES, EPOCHS, ROUNDS = 1024, 14, 2, 5
# Sizes of updates for which there are enough images for an epoch.
SIZES = (SIZE, 2048, 4096)
MODELS = ("mlp", "cnn", "transformer")
# How many plain steps a private one with four physical batches may take.
TARGETS = {"mlp": 1.35, "cnn": 1.6, "transformer": 1.35, "low_rank": 1.35}
ONE, FOUR = "make_private, one batch", "make_private, four physical batches"
NORMS, CLIPPED = "wrap(quantity='norms')", "wrap(clip_norm=1.0)"
WAYS = ("plain", CLIPPED, ONE, FOUR)
# As Papernot et al. (2021), https://arxiv.org/abs/2007.14191, report it, at epsilon 2.7.
PUBLISHED, EPSILONS = 0.861, (0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
RECIPE = {"epochs": 40, "expected_batch_size": 2048, "clip_norm": 0.1, "delta": 1e-5}
LEARNING_RATE, MOMENTUM = 4.0, 0.9


def prepared(name, way, jit_compile, size=SIZE):
    """A compiled model and the arguments of its `fit`."""
    import keras
    from models import batch_of, loss_of, model_of

    from keras_paragrad import wrap
    from keras_paragrad.privacy import make_private

    model, data = model_of(name), batch_of(name, size * UPDATES)
    options = {"batch_size": size}
    if way in (NORMS, CLIPPED):
        model = wrap(model, **({"quantity": "norms"} if way == NORMS else {"clip_norm": 1.0}))
    elif way != "plain":
        settings = {"clip_norm": 1.0, "expected_batch_size": size, "delta": 1e-6, "noise_multiplier": 1.0}
        private = make_private(model, **settings, examples=len(data[0]))
        if way == FOUR:
            # Without a size, a physical batch has as many rows as an update usually draws.
            _, rows = private.privacy.rows()
            private = make_private(model, **settings, examples=len(data[0]), physical_batch_size=-(-rows // 4))
        model, options = private, {}
    model.compile(keras.optimizers.SGD(0.01), loss_of(), jit_compile=jit_compile)
    return model, data, options


def timed(name, way, jit_compile, size):
    """A case for `in_plain`: the median time of a step in `fit`, in ms.

    The whole time of `fit` says less: when an epoch ends, TensorFlow's iterators now and then wait for their autotuner,
    as long as the epoch took. Keras's iterators of arrays do, also with the plain model.
    """
    import keras

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            began.append(time.perf_counter())

        def on_train_batch_end(self, batch, logs=None):
            took.append((time.perf_counter() - began[-1]) * 1e3)

    model, data, options = prepared(name, way, jit_compile, size)
    began, took = [], []

    def run():
        took.clear()
        model.fit(*data, epochs=EPOCHS, verbose=0, callbacks=[Steps()], **options)
        return statistics.median(took)

    return run


def report_ratios(title, names, ways, sizes=(SIZE,)):
    rows = []
    for name, size, jit_compile in itertools.product(names, sizes, (False, True)):
        plain, ratios = in_plain({way: timed(name, way, jit_compile, size) for way in ways}, ROUNDS)
        case = f"{name}, jit {'on' if jit_compile else 'off'}" + (f", {size} examples" if len(sizes) > 1 else "")
        rows.append([case, plain, *(ratios[way] for way in ways[1:]), TARGETS[name]])
    columns = ["", "plain, ms", *(f"{way}, to plain" for way in ways[1:]), "four, at most"]
    report("privacy", title, columns, rows)


def times():
    report_ratios(f"A step of {SIZE} examples in fit", MODELS, WAYS)


def sizes():
    report_ratios("A step of the MLP in fit, by its examples", ["mlp"], WAYS, SIZES)


def low_rank():
    ways = ("plain", NORMS, *WAYS[1:])
    report_ratios(f"A step of {SIZE} examples with LoRA of rank 4 in the transformer", ["low_rank"], ways)


def print_peak(name, way):
    """Runs in a separate process; prints its peak memory in MB."""
    model, data, options = prepared(name, way, jit_compile=False)
    model.fit(*data, verbose=0, **options)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def printed(*command):
    """Runs a command, and returns the lines that it prints."""
    command = [str(word) for word in command]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent, check=True)
    return finished.stdout.splitlines()


def peak(name, way):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow before.
    return float(printed(sys.executable, "-W", "ignore", __file__, "peak", name, way)[-1])


def memory():
    rows = [[name, *(round(peak(name, way)) for way in WAYS)] for name in MODELS]
    report("privacy", f"Peak memory of the process, MB, in steps of {SIZE} examples", ["", *WAYS], rows)


def peers():
    """Reports the private step of other libraries, to a plain one of the same framework."""
    rows = []
    for framework, library in (("torch", "Opacus, ghost clipping"), ("jax", "JAX-Privacy")):
        python = PEERS / framework / "bin" / "python"
        if not python.exists():
            print(f"Without {library}, which is not installed: make bench-peers")
            continue
        found = [json.loads(line) for line in printed(python, "-m", f"peers.privacy_{framework}") if line[:1] == "{"]
        rows += [[library, each["model"], each["examples"], each["plain"], each["ratio"]] for each in found]
    if rows:
        columns = ["", "model", "examples", "plain, ms", "private, four physical batches, to plain"]
        report("privacy", "A step in other libraries", columns, rows)


def trained(epsilon, learning_rate=LEARNING_RATE):
    """Trains with an epsilon, or without privacy for `None`; returns test accuracy, noise multiplier and seconds."""
    import keras
    import numpy as np
    from models import cnn, loss_of

    from keras_paragrad.privacy import make_private

    keras.utils.set_random_seed(0)
    images, classes = fashion_mnist(60_000)
    model, optimizer, options = cnn("tanh"), keras.optimizers.Adam(1e-3), {"batch_size": 256, "epochs": 20}
    if epsilon is not None:
        model = make_private(model, **RECIPE, target_epsilon=epsilon, physical_batch_size=256, seed=0)
        optimizer, options = keras.optimizers.SGD(learning_rate, momentum=MOMENTUM), {"epochs": RECIPE["epochs"]}
    model.compile(optimizer, loss_of())
    start = time.perf_counter()
    # Scaled by constants, not by statistics of the images.
    model.fit(2 * images - 1, classes, verbose=0, **options)
    seconds = time.perf_counter() - start
    images, classes = fashion_mnist(10_000, "t10k")
    predicted = model.predict(2 * images - 1, batch_size=500, verbose=0).argmax(-1)
    noise = None if epsilon is None else model.privacy.noise_multiplier
    return float(np.mean(predicted == classes)), noise, round(seconds)


def accuracy(*epsilons):
    """Reports accuracies after each training; rows of other epsilons that were measured before stay."""
    title = "Accuracy on Fashion-MNIST, a CNN with tanh"
    columns = ["epsilon", "accuracy", "noise multiplier", "seconds"]
    path = RESULTS / "privacy.json"
    known = json.loads(path.read_text()).get(title, []) if path.exists() else []
    rows = {each["epsilon"]: list(each.values()) for each in known}
    for epsilon in epsilons or (*EPSILONS, None):
        rows[epsilon] = [epsilon, *trained(epsilon)]
        # Without privacy comes last.
        ordered = sorted(rows, key=lambda each: (each is None, each or 0))
        report("privacy", title, columns, [rows[each] for each in ordered])


PARTS = {"memory": memory, "times": times, "sizes": sizes, "low_rank": low_rank, "peers": peers, "accuracy": accuracy}

if __name__ == "__main__":
    first, *rest = sys.argv[1:] or [None]
    if first == "peak":
        print_peak(*rest)
    elif first == "accuracy":
        accuracy(*(None if each == "none" else float(each) for each in rest))
    else:
        # In their order: memory comes before TensorFlow is loaded.
        for part in sorted(sys.argv[1:] or PARTS, key=list(PARTS).index):
            PARTS[part]()
