"""The training that is broken off and gone on with: by two workers, and by one."""

import contextlib
import resource

import keras
import numpy as np

from keras_paragrad import AccumulatingOptimizer

BATCH_SIZE, EPOCHS, STEPS = 8, 3, 12
# Names of files that are no backups, unless they begin as one.
NOT_OURS = [
    "database.backup",
    "archive.backup.tar.gz",
    "dump.backup.partial",
    "weights.backup.damaged",
    "epoch-1-batch-2.backup",
    "epoch-000000-batch-0000000003.backup.tar.gz",
    "epoch-000000-batch-0000000003.backup.bak",
    "epoch-000000-batch-0000000001.backup",
    "epoch-000001-batch-0000000000.backup.damaged",
    "epoch-000002-batch-0000000000.backup.partial",
    "epoch-000009-batch-0000000000.backup",
]


def data(rows=BATCH_SIZE * STEPS):
    """The same rows in every process."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(rows, 6)).astype("float32"), draw.integers(0, 3, size=rows)


def build(rate=None):
    """A model with an optimizer whose windows go on over the ends of epochs; with dropout, if a rate is given."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dropout(rate)] if rate else []
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), *layers, keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01, use_ema=True, global_clipnorm=0.5)
    model.compile(AccumulatingOptimizer(adam, 5, tail="carry"), loss, metrics=["accuracy"], jit_compile=False)
    return model


@contextlib.contextmanager
def limited_files(size):
    """Within it, no file can grow beyond so many bytes, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
