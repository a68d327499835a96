"""What the gradients of single examples cost, in time and memory, beside the plain gradient of the batch.

`python benchmarks/per_example.py` prints the tables and saves them in `results/per_example.json`. JAX and PyTorch are
in them where `make bench-peers` has installed them. `python benchmarks/per_example.py sweep` does the sweep over shapes
alone; `sweep cpu` takes the processor time of one thread, which says more on a machine that does other things.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import report, timed_fit
from sizes import MODELS, ROWS

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# On Linux a process's peak begins with what its parent holds, so the one that starts the others loads no TensorFlow.
if sys.argv[1:] and sys.argv[1] != "sweep":
    import keras
    import tensorflow as tf
    from models import batch_of, endless, loss_of, model_of
    from peers.ratios import in_plain, print_ratios
    from per_example_sweep import print_points

    from keras_paragrad import per_example_gradients, wrap

BENCHMARKS = Path(__file__).parent
PEERS = BENCHMARKS.parent / ".venv-peers"
STEPS, ROUNDS = 60, 7
# By name, the options of `wrap`.
QUANTITIES = {
    "norms": {"quantity": "norms"},
    "clipped update": {"clip_norm": 1.0},
    "gradients": {"quantity": "gradients"},
    "second moment": {"quantity": "second_moment"},
}
WAYS = {"plain": None, **QUANTITIES}
READING = "reading gradients, once"
# At most so many times plain training.
TARGETS = {
    "norms": {"mlp": 1.15, "cnn": 1.4, "transformer": 1.15},
    "clipped update": {"mlp": 1.25, "cnn": 1.45, "transformer": 1.3},
}
# Large enough that what a batch takes shows.
MEMORY_BATCHES = {"mlp": 8192, "cnn": 4096, "transformer": 2048}
# Of every point of the sweep.
SWEEP_TARGET = 1.5
CORRUPTS = "corrupts memory"


def trained(name, options, jit_compile):
    """A compiled model; with `options`, wrapped by `wrap`."""
    model = model_of(name)
    if options is not None:
        # Without room made for them beforehand, gradients are not compiled by XLA.
        room = {"capacity": ROWS[name]} if options.get("quantity") == "gradients" else {}
        model = wrap(model, **options, **room)
    # SGD takes the least time of all optimizers, so that what `wrap` adds to the gradient shows.
    model.compile(keras.optimizers.SGD(0.01), loss_of(), jit_compile=jit_compile)
    if model.jit_compile != jit_compile:
        raise RuntimeError(f"Keras has set jit_compile={model.jit_compile} for {name} with {options}.")
    return model


def time_to_read(layer):
    """The milliseconds that it takes to read the gradients that a step has left."""

    def read():
        start = time.perf_counter()
        assert layer.gradients
        return (time.perf_counter() - start) * 1e3

    return statistics.median(read() for _ in range(ROUNDS))


def print_fits():
    """Runs in a separate process; prints a JSON line for each model, jit on and off."""
    for name in MODELS:
        for jit in ("off", "on"):
            data = endless(*batch_of(name))
            models = {way: trained(name, options, jit == "on") for way, options in WAYS.items()}
            fits = {way: timed_fit(model, data, STEPS, STEPS) for way, model in models.items()}
            milliseconds, ratios = in_plain(fits, ROUNDS)
            ratios[READING] = time_to_read(models["gradients"].per_example) / milliseconds
            print(json.dumps({"model": name, "jit": jit, "plain": milliseconds, "ratios": ratios}), flush=True)


class Ways:
    """Ways to compute a model's per-example gradients in TensorFlow, as functions without arguments."""

    def __init__(self, name):
        self.name = name
        self.model = model_of(name)
        self.weights = [variable.value for variable in self.model.trainable_variables]
        self.x, self.y = map(tf.constant, batch_of(name))

    def losses(self, x, y):
        return loss_of("none")(y, self.model(x, training=True))

    def plain(self):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.losses(self.x, self.y))
        return tape.gradient(loss, self.weights)

    def of_one(self, row):
        x, y = row
        with tf.GradientTape() as tape:
            loss = self.losses(x[tf.newaxis], y[tf.newaxis])
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, self.weights)]

    def ours(self):
        return per_example_gradients(self.model, self.x, self.y, loss_of(), training=True)

    def python_loop(self):
        rows = zip(self.x, self.y, strict=True)
        return [tf.stack(gradients) for gradients in zip(*map(self.of_one, rows), strict=True)]

    def map_fn(self):
        signature = [tf.TensorSpec(weight.shape) for weight in self.weights]
        return tf.map_fn(self.of_one, (self.x, self.y), fn_output_signature=signature)

    def vectorized_map(self):
        return tf.vectorized_map(self.of_one, (self.x, self.y))

    def jacobian(self):
        with tf.GradientTape() as tape:
            losses = self.losses(self.x, self.y)
        return tape.jacobian(losses, self.weights)

    def compiled(self, jit):
        """By name, the compiled functions: first the plain gradient, then the ways that don't corrupt memory."""
        ways = {
            "plain": self.plain,
            "gradients: keras_paragrad": self.ours,
            "gradients: tf.map_fn": self.map_fn,
            "gradients: tape.jacobian": self.jacobian,
            "gradients: tf.vectorized_map": self.vectorized_map,
        }
        if self.name == "transformer" and jit == "off":
            del ways["gradients: tf.vectorized_map"]
        functions = {way: tf.function(function, jit_compile=jit == "on") for way, function in ways.items()}
        if jit == "off":
            functions["gradients: Python loop"] = self.python_loop
        return functions


def print_functions():
    """Runs in a separate process; prints the JSON lines of `print_ratios` for all models, jit on and off."""
    for name in MODELS:
        for jit in ("off", "on"):
            print_ratios(name, jit, Ways(name).compiled(jit), rounds=3)
    print(json.dumps({"way": "gradients: tf.vectorized_map", "model": "transformer", "jit": "off", "ratio": CORRUPTS}))


def print_peak(name, way, jit, rows):
    """Runs in a separate process; prints its peak memory in MB."""
    x, y = batch_of(name, int(rows))
    if way != "nothing trained":
        trained(name, WAYS[way], jit == "on").fit(x, y, len(x), epochs=3, verbose=0)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6))


def lines(python, *arguments):
    """Runs Python with these arguments, and returns the lines that it prints, parsed as JSON."""
    command = [str(python), "-W", "ignore", *map(str, arguments)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=BENCHMARKS, timeout=1800, check=True)
    return [json.loads(line) for line in finished.stdout.splitlines()]


def function_ratios():
    """The ratios of TensorFlow's ways and of the peers that are installed, measured in separate processes."""
    found = lines(sys.executable, __file__, "functions")
    for peer in ("jax", "torch"):
        python = PEERS / peer / "bin" / "python"
        if python.exists():
            found += lines(python, "-m", f"peers.per_example_{peer}")
        else:
            print(f"Without {peer}, which is not installed: make bench-peers")
    return found


def report_fits(jax):
    """Reports every quantity in `fit`; `jax` has the ratio of JAX's gradients by model, if JAX is installed."""
    found = {(line["model"], line["jit"]): line for line in lines(sys.executable, __file__, "fit")}
    rows = []
    for name, title in MODELS.items():
        off, on = found[name, "off"], found[name, "on"]
        targets = {way: TARGETS.get(way, {}).get(name, "") for way in (*QUANTITIES, READING)}
        targets["gradients"] = jax.get(name, "JAX's")
        rows.append([f"{title}: plain, ms", off["plain"], on["plain"], ""])
        rows += [[f"  {way}", off["ratios"][way], on["ratios"][way], targets[way]] for way in targets]
    report("per_example", "A step of fit, in plain steps", ["", "jit off", "jit on", "at most"], rows)


def report_functions(found):
    """Reports the `found` lines of `print_ratios`, with a column for each model."""
    ratios = {(line["way"], line["jit"], line["model"]): line["ratio"] for line in found}
    ways = dict.fromkeys((way, jit) for way, jit, _ in ratios)
    rows = [[way, jit, *(ratios.get((way, jit, name), "") for name in MODELS)] for way, jit in sorted(ways)]
    title = "The gradient of every example, in plain batch gradients of the same framework"
    report("per_example", title, ["", "jit", *MODELS.values()], rows)


def report_sweep(clock="wall"):
    """Reports norms and clipped updates over shapes, and the worst of each rule."""
    rows = lines(sys.executable, __file__, "points", clock)
    unit = "processor time of one thread" if clock == "cpu" else "wall time"
    columns = ["rule", "shape", "jit", "plain", "norms", "clipped"]
    title = f"Norms and clipped updates over shapes, in plain steps ({unit}; plain in ms)"
    report("per_example", title, columns, [[row[column] for column in columns] for row in rows])
    worst = []
    for rule, jit in sorted({(row["rule"], row["jit"]) for row in rows}):
        alike = [row for row in rows if (row["rule"], row["jit"]) == (rule, jit)]
        worst.append([rule, jit, *(max(row[way] for row in alike) for way in ("norms", "clipped")), SWEEP_TARGET])
    title = f"The worst of each rule over shapes, in plain steps ({unit})"
    report("per_example", title, ["rule", "jit", "norms", "clipped", "at most"], worst)


def peak(*case):
    return lines(sys.executable, __file__, "memory", *case)[0]


def report_memory():
    """Reports what norms add to the peak memory of plain training."""
    # Nothing is trained, whatever the model.
    idle = peak("mlp", "nothing trained", "off", 1)
    rows = []
    for name, title in MODELS.items():
        for size in (ROWS[name], MEMORY_BATCHES[name]):
            for jit in ("off", "on"):
                plain, norms = (peak(name, way, jit, size) for way in ("plain", "norms"))
                case = f"{title.partition(',')[0]}, batch of {size}, jit {jit}"
                ratio = (norms - idle) / (plain - idle)
                rows.append([case, round(plain - idle), round(norms - idle), ratio, norms / plain])
    columns = ["", "plain training", "with norms", "ratio", "ratio of whole processes"]
    report("per_example", "Peak memory above an idle process, MB", columns, rows)


def main():
    section, *arguments = sys.argv[1:] or [None]
    if section == "sweep":
        report_sweep(*arguments)
        return
    if section == "points":
        clock, *words = arguments
        print_points(clock == "cpu", *words)
        return
    if section:
        {"fit": print_fits, "functions": print_functions, "memory": print_peak}[section](*arguments)
        return
    if hasattr(os, "sched_setaffinity"):
        # The same two cores for all frameworks.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    found = function_ratios()
    report_fits({line["model"]: line["ratio"] for line in found if line["way"] == "gradients: JAX vmap(grad)"})
    report_functions(found)
    report_memory()
    report_sweep()


if __name__ == "__main__":
    main()
