"""What input Jacobians cost: beside other ways and other frameworks, in either mode, and in memory.

`python benchmarks/input_gradients.py` prints the tables and saves them in `results/input_gradients.json`. JAX and
PyTorch are measured where `make bench-peers` has installed them.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from harness import interleaved, report

CHUNK, CHUNKS, WIDTH, ROUNDS = 2048, 4, 256, 4
# The numbers of inputs and of outputs of a row.
SIZES = ((8, 100), (32, 32), (100, 8))
PEERS = Path(__file__).parents[1] / ".venv-peers"
PEER_COLUMNS = {
    "torch": ["torch jacrev(chunk_size)", "torch jacfwd"],
    "jax": ["JAX jacrev", "JAX jacfwd"],
}
# By name: the way, and how many thousand rows.
MEMORY = {
    "nothing differentiated": (None, 0),
    "streamed, 20,000 rows": ("stream", 20),
    "streamed, 200,000 rows": ("stream", 200),
    "in memory, 20,000 rows": ("array", 20),
    "in memory, 200,000 rows": ("array", 200),
    "batch_jacobian of all, 4,000 rows": ("batch_jacobian", 4),
}


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def dense(inputs, outputs):
    import keras

    hidden = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


def crossover_models():
    """Models with as many outputs as inputs, so that both modes need as many passes, whose times are compared."""
    import keras
    from keras import layers

    x = keras.Input((6, 4))
    hidden = layers.Dense(16)(x)
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 8)(hidden, hidden) + hidden)
    convolutions = [layers.Conv2D(16, 3, activation="silu") for _ in range(2)]
    head = [layers.Flatten(), layers.Dense(64)]
    return {
        "dense, 32": dense(32, 32),
        "convolution, 64": keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *head]),
        "attention, 24": keras.Model(x, layers.Dense(24)(layers.Flatten()(hidden))),
        "LSTM, 24": keras.Sequential([keras.Input((6, 4)), layers.LSTM(32), layers.Dense(24)]),
    }


def timed(function):
    """A case for `interleaved`: milliseconds per chunk of a function that is called for each chunk."""

    def run():
        start = time.perf_counter()
        for _ in range(CHUNKS):
            function()
        return (time.perf_counter() - start) / CHUNKS * 1e3

    return run


def streamed(start_stream):
    """A case for `interleaved`: milliseconds per chunk of a stream, after the first, for which it compiles."""

    def run():
        stream = start_stream()
        next(stream)
        start = time.perf_counter()
        count = sum(1 for _ in stream)
        return (time.perf_counter() - start) / count * 1e3

    return run


def batch_jacobian(model, x):
    """A function that computes the Jacobians of rows by TensorFlow's `batch_jacobian`, compiled once."""
    import tensorflow as tf

    @tf.function(autograph=False)
    def compiled(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=False)
        return tape.batch_jacobian(y, x)

    x = tf.constant(x)
    return lambda: compiled(x).numpy()


def tape_loop(model, x):
    """A function that computes the Jacobians of rows by a persistent tape and a Python loop over the outputs."""
    import tensorflow as tf

    x = tf.constant(x)

    def loop():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = tf.unstack(model(x, training=False), axis=1)
        return np.stack([tape.gradient(output, x).numpy() for output in outputs], axis=1)

    return loop


def beside_other_ways():
    """Reports the times of one gradient, of the Jacobian in other ways, and in other frameworks."""
    from keras_paragrad.inputs.gradients import input_gradients
    from keras_paragrad.inputs.jacobian import input_jacobian

    peers = {name: of_peer(name) for name in PEER_COLUMNS}
    rows = []
    for inputs, outputs in SIZES:
        model, x = dense(inputs, outputs), normal(CHUNK * (CHUNKS + 1), inputs)
        took = interleaved(
            {
                "one gradient": streamed(lambda model=model, x=x: input_gradients(model, x, 0, stream=True)),
                "input_jacobian": streamed(lambda model=model, x=x: input_jacobian(model, x, stream=True)),
                "batch_jacobian": timed(batch_jacobian(model, x[:CHUNK])),
                "tape loop": timed(tape_loop(model, x[:CHUNK])),
            },
            ROUNDS,
            warm_up=1,
        )
        others = [cell for name in PEER_COLUMNS for cell in peers[name][f"{inputs}, {outputs}"]]
        ratio = took["batch_jacobian"] / took["input_jacobian"]
        rows.append([f"{inputs} in, {outputs} out", *took.values(), *others, ratio])
    columns = ["one gradient", "input_jacobian", "batch_jacobian", "tape loop", *sum(PEER_COLUMNS.values(), [])]
    title = f"Milliseconds for the Jacobians of {CHUNK} rows, compiled before: two dense layers of {WIDTH}, tanh"
    report("input_gradients", title, ["", *columns, "batch_jacobian to ours"], rows)


def whole_call():
    """Reports the time of a whole call, which compiles, beside `batch_jacobian` on chunks, compiled before."""
    from keras_paragrad.inputs.jacobian import input_jacobian

    inputs, outputs = SIZES[0]
    rows = CHUNK * 16
    model, x = dense(inputs, outputs), normal(rows, inputs)
    theirs = batch_jacobian(model, x[:CHUNK])

    def call():
        start = time.perf_counter()
        input_jacobian(model, x, batch_size=CHUNK)
        return (time.perf_counter() - start) * 1e3

    def chunks():
        start = time.perf_counter()
        np.concatenate([theirs() for _ in range(16)])
        return (time.perf_counter() - start) * 1e3

    took = interleaved({"input_jacobian": call, "batch_jacobian": chunks}, rounds=3, warm_up=1)
    report(
        "input_gradients",
        f"Milliseconds for {rows} rows, {inputs} in, {outputs} out: ours with compiling, batch_jacobian without",
        ["", *took, "batch_jacobian to ours"],
        [["whole call", *took.values(), took["batch_jacobian"] / took["input_jacobian"]]],
    )


def crossover():
    """Reports forward beside reverse mode, where both need as many passes."""
    from keras_paragrad.inputs.jacobian import input_jacobian

    rows = []
    for name, model in crossover_models().items():
        x = normal(1024 * 4, *model.input_shape[1:])
        took = interleaved(
            {
                mode: streamed(
                    lambda mode=mode, model=model, x=x: input_jacobian(model, x, mode, batch_size=1024, stream=True)
                )
                for mode in ("forward", "reverse")
            },
            rounds=3,
            warm_up=1,
        )
        rows.append([name, *took.values(), took["forward"] / took["reverse"]])
    title = "Milliseconds for the Jacobians of 1024 rows, as many numbers in as out"
    report("input_gradients", title, ["", "forward", "reverse", "forward to reverse"], rows)


def of_peer(name):
    """The times of another framework in its environment, for each of `SIZES`; dashes if it is not installed."""
    python = PEERS / name / "bin" / "python"
    missing = {f"{inputs}, {outputs}": ["-"] * len(PEER_COLUMNS[name]) for inputs, outputs in SIZES}
    if not python.exists():
        print(f"{name} is not installed, and left out. Install it: make bench-peers")
        return missing
    finished = subprocess.run([python, __file__, name], capture_output=True, text=True, timeout=300, check=False)
    if finished.returncode:
        print(f"{name} does not run, and is left out:\n{finished.stderr[-500:]}")
        return missing
    return json.loads(finished.stdout.splitlines()[-1])


def weights_of(inputs, outputs):
    sizes = (inputs, WIDTH, WIDTH, outputs)
    return [normal(*pair) / np.float32(pair[0] ** 0.5) for pair in zip(sizes[:-1], sizes[1:], strict=True)]


def print_torch():
    """Runs in PyTorch's environment; prints the times of its ways for each of `SIZES`."""
    import torch

    took = {}
    for inputs, outputs in SIZES:
        first, second, last = (torch.tensor(weight) for weight in weights_of(inputs, outputs))
        x = torch.tensor(normal(CHUNK, inputs))

        def function(row, first=first, second=second, last=last):
            return torch.tanh(torch.tanh(row @ first) @ second) @ last

        ways = {
            "jacrev": torch.func.vmap(torch.func.jacrev(function, chunk_size=max(1, outputs // 4))),
            "jacfwd": torch.func.vmap(torch.func.jacfwd(function)),
        }
        cases = {name: timed(lambda way=way, x=x: way(x).numpy()) for name, way in ways.items()}
        took[f"{inputs}, {outputs}"] = list(interleaved(cases, ROUNDS, warm_up=1).values())
    print(json.dumps(took))


def print_jax():
    """Runs in JAX's environment; prints the times of its ways for each of `SIZES`."""
    import jax
    import jax.numpy as jnp

    took = {}
    for inputs, outputs in SIZES:
        first, second, last = (jnp.asarray(weight) for weight in weights_of(inputs, outputs))
        x = jnp.asarray(normal(CHUNK, inputs))

        def function(row, first=first, second=second, last=last):
            return jnp.tanh(jnp.tanh(row @ first) @ second) @ last

        ways = {name: jax.jit(jax.vmap(getattr(jax, name)(function))) for name in ("jacrev", "jacfwd")}
        cases = {name: timed(lambda way=way, x=x: np.asarray(way(x))) for name, way in ways.items()}
        took[f"{inputs}, {outputs}"] = list(interleaved(cases, ROUNDS, warm_up=1).values())
    print(json.dumps(took))


def print_peak(case):
    """Runs in a separate process; prints its peak memory in MB, with the result if the case keeps that in memory."""
    from keras_paragrad.inputs.jacobian import input_jacobian

    way, thousands = MEMORY[case]
    model, x = dense(*SIZES[0]), normal(1000, SIZES[0][0])
    batches = (x for _ in range(thousands))
    if way == "stream":
        for _ in input_jacobian(model, batches, stream=True):
            pass
    elif way == "array":
        input_jacobian(model, batches)
    elif way == "batch_jacobian":
        batch_jacobian(model, np.tile(x, (thousands, 1)))()
    else:
        model(x)
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def peak(case):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow.
    command = [sys.executable, "-W", "ignore", __file__, "memory", case]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(finished.stdout.split()[-1])


def memory():
    """Reports peak memory above an idle process, with and without the result that is kept in memory."""
    idle, *cases = MEMORY
    base = peak(idle)
    numbers = SIZES[0][0] * SIZES[0][1]
    rows = []
    for case in cases:
        way, thousands = MEMORY[case]
        result = round(thousands * 1000 * numbers * 4 / 1e6) if way in ("array", "batch_jacobian") else 0
        above = round(peak(case) - base)
        rows.append([case, above, result, above - result])
    title = "Peak memory above an idle process, MB: 8 in, 100 out, rows from a generator"
    report("input_gradients", title, ["", "peak", "of which the result", "beyond it"], rows)


def main():
    match sys.argv[1:]:
        case ["memory", case]:
            print_peak(case)
        case ["torch"]:
            print_torch()
        case ["jax"]:
            print_jax()
        case _:
            memory()
            beside_other_ways()
            whole_call()
            crossover()


if __name__ == "__main__":
    main()
