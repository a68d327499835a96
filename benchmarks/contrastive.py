"""What a loss that compares examples takes in slices: memory against the batch, and time against other ways.

`python benchmarks/contrastive.py` prints the tables and saves them in `results/contrastive.json`.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import peak_memory, report, report_step_times, run_benchmark

SIZE, ROUNDS, TIMED = 64, 5, 512
BATCHES = (256, 1024, 4096)
# By name: the size of slices, the arguments of `microbatch`, and whether layers are recomputed.
CASES = {
    "whole batch": (None, {}, False),
    "recompute(model, every=1)": (None, {}, True),
    f"microbatch(size={SIZE})": (SIZE, {}, False),
    # Another loss: examples are compared within a slice. Each slice runs once.
    f"microbatch(size={SIZE}, weighting='examples')": (SIZE, {"weighting": "examples"}, False),
}
WHOLE, RECOMPUTED, OURS, PLAIN = CASES


def contrastive_model(case, jit_compile, rows):
    """A convolutional encoder of two views, compiled with the loss of SimCLR, and the arrays of a batch."""
    import warnings

    import keras
    import numpy as np

    from keras_paragrad import microbatch, recompute

    # The warning that slices with a loss of their own don't take the whole batch's step.
    warnings.simplefilter("ignore")

    class PairLoss(keras.losses.Loss):
        """The loss of finding an example's second view, by its first, among the second views of the batch."""

        def call(self, y, z):
            views = keras.ops.split(z, 2, axis=-1)
            a, b = (view / keras.ops.norm(view, axis=-1, keepdims=True) for view in views)
            similarity = keras.ops.matmul(a, keras.ops.transpose(b)) / 0.1
            own = keras.ops.arange(keras.ops.shape(similarity)[0])
            return keras.losses.sparse_categorical_crossentropy(own, similarity, from_logits=True)

    keras.utils.set_random_seed(0)
    layers = keras.layers
    encoder = keras.Sequential([keras.Input((28, 28, 1))])
    for _ in range(3):
        encoder.add(layers.Conv2D(16, 3, padding="same", activation="relu"))
    encoder.add(layers.GlobalAveragePooling2D())
    encoder.add(layers.Dense(64))
    views = [keras.Input((28, 28, 1)) for _ in range(2)]
    model = keras.Model(views, layers.Concatenate()([encoder(view) for view in views]))
    model.compile("adam", PairLoss(), jit_compile=jit_compile)
    size, options, recomputed = CASES[case]
    if recomputed:
        recompute(encoder, every=1)
    if size:
        microbatch(model, size, **options)
    generator = np.random.default_rng(0)
    x = tuple(generator.uniform(size=(rows, 28, 28, 1)).astype("float32") for _ in range(2))
    return model, x, np.zeros(rows, "float32")


def train(case, rows, trains):
    """Makes a model and a batch of some rows; trains two steps if `trains` is `"yes"`."""
    from models import endless

    model, *data = contrastive_model(case, False, int(rows))
    if trains == "yes":
        model.fit(endless(*data), steps_per_epoch=2, verbose=0)


def peak(case, rows, trains="yes"):
    return peak_memory(__file__, case, str(rows), trains)


def memory():
    idle = {rows: peak(WHOLE, rows, "no") for rows in BATCHES}
    rows = [[case, *(round(peak(case, each) - idle[each]) for each in BATCHES)] for case in (WHOLE, RECOMPUTED, OURS)]
    columns = ["", *(f"batch of {each}" for each in BATCHES)]
    report("contrastive", "Peak memory above the built model and its data, MB: SimCLR, convolutions", columns, rows)


def times():
    title = f"SimCLR, convolutions, batch of {TIMED}"
    report_step_times(
        "contrastive", title, lambda *case: contrastive_model(*case, TIMED), CASES, PLAIN, "plain slices", ROUNDS
    )


if __name__ == "__main__":
    run_benchmark(train, memory, times)
