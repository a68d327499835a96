"""What a batch takes in memory: whole, accumulated, and in slices.

`python benchmarks/memory.py` prints the table and saves it in `results/memory.json`.
"""

import platform
import resource
import subprocess
import sys

from harness import fashion_mnist, report

# By name: the micro-batches of an update, how they are accumulated, the rows of a batch, and of its slices.
CASES = {
    "nothing trained": (0, None, 1, None),
    "one batch of 1024": (1, None, 1024, None),
    "one batch of 4096": (1, None, 4096, None),
    "built-in, k=8 of 128": (8, "built-in", 128, None),
    "AccumulatingOptimizer, k=8 of 128": (8, "ours", 128, None),
    "microbatch(128), batch of 1024": (1, None, 1024, 128),
    "microbatch(128), batch of 4096": (1, None, 4096, 128),
    "microbatch(512), batch of 4096": (1, None, 4096, 512),
}


def train(case, jit_compile):
    """Trains an epoch of a model with few parameters and large activations, so that what a batch takes shows."""
    import keras

    from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch

    steps, way, batch_size, size = CASES[case]
    x, y = fashion_mnist(4096)
    if not steps:
        return
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=steps if way == "built-in" else None)
    if way == "ours":
        optimizer = AccumulatingOptimizer(optimizer, steps)
    convolutions = [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(3)]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((28, 28, 1)), *convolutions, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    if size:
        microbatch(model, size)
    exact = [ExactAccumulation()] if way == "ours" else []
    model.fit(x, y, batch_size, verbose=0, shuffle=False, callbacks=exact)


def print_peak(case, jit_compile):
    """Runs in a separate process; prints its peak memory in MB."""
    train(case, jit_compile == "on")
    unit = 1 if platform.system() == "Darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def peak(case, jit_compile):
    # On Linux a process's peak begins with what its parent holds, so this one must not load TensorFlow.
    command = [sys.executable, "-W", "ignore", __file__, case, jit_compile]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return float(finished.stdout.split()[-1])


def main():
    if sys.argv[1:]:
        print_peak(*sys.argv[1:])
        return
    idle, *cases = CASES
    base = peak(idle, "off")
    rows = [[case, *(round(peak(case, jit_compile) - base) for jit_compile in ("off", "on"))] for case in cases]
    report(
        "memory", "Peak memory above an idle process, MB: convolutions, Fashion-MNIST", ["", "jit off", "jit on"], rows
    )


if __name__ == "__main__":
    main()
