"""How long training waits for backups: ours, written by a thread and synchronously, and the ones of Keras and Orbax.

`python benchmarks/backups.py` prints the tables and saves them in `results/backups.json`.
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from harness import report
from models import endless

from keras_paragrad.distribution import Backup

NAME = "backups"
# Three matrices of 4096 by 4096 take 200 MB, with Adam 600 MB.
WIDTH, DEPTH, BATCH = 4096, 3, 64
EVERY, BACKUPS, ROUNDS = 20, 2, 3
# What a slow disk writes in a second, in bytes.
SLOW = 50e6
NONE, OURS, KERAS = "no backups", "Backup", "keras BackupAndRestore"
ORBAX = "keras OrbaxCheckpoint, asynchronous"


def build():
    """A model of 200 MB."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    return model


def timed_batches(callback):
    """Has a callback record how many seconds it takes after each batch; returns the list, which grows in `fit`."""
    seconds, after_batch = [], callback.on_train_batch_end

    def timed(batch, logs=None):
        begun = time.perf_counter()
        after_batch(batch, logs)
        seconds.append(time.perf_counter() - begun)

    callback.on_train_batch_end = timed
    return seconds


@contextlib.contextmanager
def slow_disk():
    """Context in which flushing a file takes as long as on a slow disk."""
    flush = os.fsync

    def fsync(file):
        flush(file)
        time.sleep(os.fstat(file).st_size / SLOW)

    os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = flush


def callback_of(case, directory):
    """The callback of a case; `None` without backups."""
    if case == NONE:
        return None
    if case == OURS:
        return Backup(directory, EVERY)
    if case == ORBAX:
        return keras.callbacks.OrbaxCheckpoint(directory, save_freq=EVERY, save_on_background=True)
    return keras.callbacks.BackupAndRestore(directory, save_freq=EVERY)


def trained(model, case):
    """Trains for `BACKUPS` backups; returns the seconds in all, and those that the callback took after batches."""
    data = endless(np.ones((BATCH, WIDTH), "float32"), np.ones((BATCH, 1), "float32"))
    with tempfile.TemporaryDirectory() as directory:
        callback = callback_of(case, directory)
        seconds = timed_batches(callback) if callback else []
        begun = time.perf_counter()
        # Training goes on while the last one is written, and no further one is due when the epoch ends.
        steps = EVERY * (BACKUPS + 1) - 1
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[callback] if callback else None)
        return time.perf_counter() - begun, sum(seconds)


def measure(disk):
    """Measures all cases by turns on the `"fast"` or `"slow"` disk, and reports them."""
    cases = [NONE, OURS, KERAS]
    if importlib.util.find_spec("orbax"):
        cases.append(ORBAX)
    model = build()
    data = endless(np.ones((BATCH, WIDTH), "float32"), np.ones((BATCH, 1), "float32"))
    model.fit(data, steps_per_epoch=3, verbose=0)
    taken = {case: [] for case in cases}
    with slow_disk() if disk == "slow" else contextlib.nullcontext():
        for _ in range(ROUNDS):
            for case in cases:
                taken[case].append(trained(model, case))
    whole, blocked = ({case: statistics.median(run[i] for run in runs) for case, runs in taken.items()} for i in (0, 1))
    rows = [
        [
            case,
            whole[case],
            whole[case] / whole[NONE],
            blocked[case] / BACKUPS,
            100 * blocked[case] / whole[NONE],
        ]
        for case in cases
    ]
    columns = ["", "seconds", "to no backups", "seconds blocked by one", "% of training"]
    title = f"{BACKUPS} backups of a model of 200 MB with Adam, every {EVERY} steps, {disk} disk"
    report(NAME, title, columns, rows)


if __name__ == "__main__":
    for disk in ("fast", "slow"):
        measure(disk)
