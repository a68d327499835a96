"""What recomputation saves in memory and costs in time: a Transformer of 12 blocks on one device.

`python benchmarks/recompute.py` prints the tables and saves them in `results/recompute.json`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import peak_memory, report, report_step_times, run_benchmark

BLOCKS, BATCH, STEPS, WIDTH, HEADS, ROUNDS = 12, 16, 256, 128, 4, 7
# By name, the arguments of `recompute`.
CASES = {
    "plain": None,
    'recompute(model, "auto")': {},
    "recompute(model, every=2)": {"every": 2},
}


def transformer(case, jit_compile):
    """The compiled model of a case, and the arrays of a batch."""
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


def train(case, jit_compile, trains):
    """Makes a model and a batch; trains two epochs if `trains` is `"yes"`."""
    model, x, y = transformer(case, jit_compile == "on")
    if trains == "yes":
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)


def memory():
    """Reports peak memory without the built model's, and which fraction of the plain case's is saved."""
    rows = []
    for case in CASES:
        row = [case]
        for jit_compile in ("off", "on"):
            taken = peak_memory(__file__, case, jit_compile, "yes") - peak_memory(__file__, "plain", jit_compile, "no")
            row += [round(taken), f"{1 - taken / rows[0][len(row)]:.0%}" if rows else ""]
        rows.append(row)
    columns = ["", "jit off", "saved, jit off", "jit on", "saved, jit on"]
    report("recompute", "Peak memory above the built model, MB: Transformer of 12 blocks, batch of 16", columns, rows)


def times():
    title = "Transformer of 12 blocks, batch of 16, Adam"
    report_step_times("recompute", title, transformer, CASES, "plain", "plain", ROUNDS)


if __name__ == "__main__":
    run_benchmark(train, memory, times)
