"""How long the first update of `fit` takes: seconds from the call until the first batch ends, against plain Keras.

`python benchmarks/startup.py` prints the table and saves it in `results/startup.json`.
"""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from harness import interleaved, report

from keras_paragrad import AccumulatingOptimizer, DistributedFit, microbatch, wrap

ROUNDS, ROWS, CLASSES = 3, 32, 10
CONVOLUTIONS, BLOCKS, WIDTH, TOKENS, WORDS = 30, 8, 64, 32, 1000
PLAIN, MIRRORED = "plain Keras", "stock MirroredStrategy"
# The case that each one's first update is compared to.
CASES = {
    PLAIN: PLAIN,
    MIRRORED: PLAIN,
    "AccumulatingOptimizer": PLAIN,
    "microbatch": PLAIN,
    "wrap": PLAIN,
    "DistributedFit": MIRRORED,
    'shard="optimizer"': MIRRORED,
    'shard="parameters"': MIRRORED,
}


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """A block of a Transformer as users write it: a custom layer, about which the package knows nothing."""

    def __init__(self, **options):
        super().__init__(**options)
        self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.hidden = keras.layers.Dense(2 * WIDTH, activation="gelu")
        self.out = keras.layers.Dense(WIDTH)

    def build(self, shape):
        """Builds the layers of the block."""
        self.attention.build(shape, shape)
        for each in self.norms:
            each.build(shape)
        self.hidden.build(shape)
        self.out.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        """Attends, and transforms each token."""
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.out(self.hidden(x)))


def cnn():
    """Thirty convolutions: layers of Keras."""
    layers = [keras.layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(CONVOLUTIONS)]
    ends = keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)
    return keras.Sequential([keras.Input((16, 16, 3)), *layers, *ends])


def transformer():
    """Eight blocks, which are custom layers."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(tokens)
    for _ in range(BLOCKS):
        x = Block()(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))


SHARDS = {'shard="optimizer"': "optimizer", 'shard="parameters"': "parameters"}
MODELS = {"CNN of 30 layers": cnn, "Transformer of 8 blocks of its own": transformer}


class FirstUpdate(keras.callbacks.Callback):
    """Records as `ended` when the first update has ended, which takes `batches` batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        """Records the time."""
        if batch + 1 == self.batches:
            self.ended = time.perf_counter()


def first_update(make, case):
    """Milliseconds from the call of `fit` to the end of its first update, with a new model."""
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    gc.collect()
    generator = np.random.default_rng(0)
    images, tokens = generator.normal(size=(ROWS, 16, 16, 3)), generator.integers(0, WORDS, (ROWS, TOKENS))
    x, y = images.astype("float32") if make is cnn else tokens, generator.integers(0, CLASSES, ROWS)
    dist = DistributedFit("mirrored", shard=SHARDS.get(case)) if CASES[case] == MIRRORED else None
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope() if case == MIRRORED else contextlib.nullcontext()
    with dist.scope() if dist else stock:
        model = wrap(make()) if case == "wrap" else make()
        optimizer = keras.optimizers.Adam(1e-3)
        if case == "AccumulatingOptimizer":
            optimizer = AccumulatingOptimizer(optimizer, steps=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    if case == "microbatch":
        microbatch(model, ROWS // 4)
    # A window of two halves is an update of the same rows.
    update = FirstUpdate(2 if case == "AccumulatingOptimizer" else 1)
    fit = functools.partial(dist.fit, model) if dist else model.fit
    start = time.perf_counter()
    fit(x, y, batch_size=ROWS // update.batches, verbose=0, shuffle=False, callbacks=[update])
    return (update.ended - start) * 1e3


def measure(name):
    """Prints and saves the table of a model."""
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)
    cases = {case: functools.partial(first_update, MODELS[name], case) for case in CASES}
    taken = interleaved(cases, ROUNDS, warm_up=1)
    rows = [[case, took / 1e3, CASES[case], took / taken[CASES[case]]] for case, took in taken.items()]
    title = f"Seconds to the end of the first update: {name}"
    report("startup", title, ["", "seconds", "compared to", "ratio"], rows)


if __name__ == "__main__":
    # A second `MirroredStrategy` in a process can fail with a model of other shapes.
    for each in sys.argv[1:] or MODELS:
        if sys.argv[1:]:
            measure(each)
        else:
            subprocess.run([sys.executable, "-W", "ignore", __file__, each], check=True)
