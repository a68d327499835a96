"""One training in sequences of worlds: how far its weights end from one device's, and with `deterministic` its digest.

    python benchmarks/worlds.py            # ten minutes on two cores; writes benchmarks/results/worlds.json

A world is a process with a number of replicas, on logical devices of the CPU. The next one takes over within an epoch,
in the middle of an accumulation window, from a backup. In the last sequence, processes are killed by SIGKILL after
batches drawn at random. A form is a kind of model, or a way to train it.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results") / "worlds.json"
FORMS = ("CNN", "LSTM", "attention", "windows of 3", "weights in shards")
# Replicas, and after how many batches the next world takes over.
World = tuple[int, int]
SEQUENCES: dict[str, Sequence[World]] = {
    "1": [(1, 0)],
    "2": [(2, 0)],
    "4": [(4, 0)],
    "2 to 1 to 3": [(2, 5), (1, 4), (3, 0)],
}
KILLS = "killed at random"
SEED, ROWS, BATCH_SIZE, EPOCHS = 7, 203, 32, 3


def build(form: str) -> Any:
    """The model of a form, before it is compiled."""
    import keras

    layers = keras.layers
    if form == "CNN":
        inputs = keras.Input((8, 8, 3))
        x = layers.GroupNormalization(4)(layers.Conv2D(8, 3, activation="relu")(inputs))
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3)(x))
    elif form in ("LSTM", "attention"):
        inputs = keras.Input((7,), dtype="int32")
        x = layers.Embedding(20, 16)(inputs)
        if form == "LSTM":
            x = layers.LSTM(8)(x)
        else:
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
            x = layers.GlobalAveragePooling1D()(x)
    else:
        inputs = keras.Input((6,))
        x = layers.Dense(32, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(5)(x))


def rows(form: str) -> tuple[Any, Any]:
    """The inputs and labels of a form."""
    import numpy as np

    draw = np.random.default_rng(0)
    y = draw.integers(0, 5, ROWS)
    if form in ("LSTM", "attention"):
        return draw.integers(0, 20, (ROWS, 7)).astype("int32"), y
    return draw.normal(size=(ROWS, *((8, 8, 3) if form == "CNN" else (6,)))).astype("float32"), y


def train(form: str, replicas: int, folder: str, *, deterministic: bool, interrupt_after: int) -> dict[str, Any] | None:
    """Trains a form in a world, resuming from a backup in `folder` if there is one.

    Returns:
        The weights, the digest and the history; `None` if another world is to take over.
    """
    import keras
    import numpy as np

    from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
    from keras_paragrad.distribution.digest import digest_of

    options: dict[str, Any] = {"deterministic": 8} if deterministic else {}
    if form == "weights in shards" and replicas > 1:
        options |= {"shard": "parameters", "min_shard_bytes": 1}
    devices = [f"CPU:{index}" for index in range(replicas)]
    dist = DistributedFit("mirrored", devices, **options) if replicas > 1 else DistributedFit("none", **options)
    keras.utils.set_random_seed(1)
    with dist.scope():
        model = build(form)
        # With its usual epsilon, Adam magnifies the rounding of gradients that are next to nothing.
        optimizer: Any = keras.optimizers.Adam(0.01, epsilon=1e-3)
        optimizer = AccumulatingOptimizer(optimizer, 3) if form.startswith("windows") else optimizer
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    class Interrupt(keras.callbacks.Callback):
        """Prints how many batches have run, which `run_world` reads, and ends this world after some of them."""

        batches = 0

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            self.batches += 1
            print("batch", self.batches, flush=True)
            if self.batches == interrupt_after:
                raise KeyboardInterrupt

    backups = dist.callbacks(folder, every=1, delete_when_done=False)
    callbacks = [*([ExactAccumulation()] if form.startswith("windows") else []), *backups, Interrupt()]
    try:
        history = dist.fit(model, *rows(form), BATCH_SIZE, EPOCHS, verbose=0, callbacks=callbacks)
    except KeyboardInterrupt:
        return None
    weights = [np.asarray(weight).ravel().tolist() for weight in model.get_weights()]
    return {"weights": weights, "digest": list(digest_of(model)[:3]), "history": history.history}


def work(task: dict[str, Any]) -> None:
    """Trains all forms of a task in one world, and leaves the results in a file."""
    import tensorflow as tf

    devices = [tf.config.LogicalDeviceConfiguration()] * task["replicas"]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    settings = {"deterministic": task["deterministic"], "interrupt_after": task["interrupt_after"]}
    folder = Path(task["folder"])
    results = {form: train(form, task["replicas"], str(folder / form), **settings) for form in task["forms"]}
    (folder / "results.json").write_text(json.dumps(results))


def run_world(task: dict[str, Any], kill_after: int = 0) -> dict[str, Any]:
    """Runs `work` in a separate process; returns the results of its forms.

    With `kill_after`, the process is killed after so many batches, and there are no results.
    """
    Path(task["folder"]).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--work", json.dumps(task)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if kill_after and line.split() == ["batch", str(kill_after)]:
                os.kill(process.pid, signal.SIGKILL)
    if kill_after:
        assert process.returncode == -signal.SIGKILL, process.returncode
        return {}
    assert process.returncode == 0, process.returncode
    return json.loads((Path(task["folder"]) / "results.json").read_text())


def run_sequence(name: str, folder: Path, *, deterministic: bool) -> dict[str, Any]:
    """The results of all forms after a sequence of worlds."""
    task = {"deterministic": deterministic, "interrupt_after": 0, "folder": str(folder), "forms": FORMS}
    if name != KILLS:
        results: dict[str, Any] = {}
        for replicas, interrupt_after in SEQUENCES[name]:
            results = run_world({**task, "replicas": replicas, "interrupt_after": interrupt_after})
        return results
    draw, results = random.Random(SEED), {}
    for form in FORMS:
        one = {**task, "folder": str(folder / form.replace(" ", "-")), "forms": [form]}
        for _ in range(3):
            run_world({**one, "replicas": draw.choice([1, 2, 3, 4])}, kill_after=draw.randint(2, 5))
        results |= run_world({**one, "replicas": draw.choice([1, 2, 3, 4])})
    return results


def error(results: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of weights, as a fraction of the largest expected weight."""
    import numpy as np

    pairs = list(zip(results["weights"], expected["weights"], strict=True))
    largest = max(float(np.abs(other).max()) for _, other in pairs)
    return max(float(np.abs(np.subtract(one, other)).max()) for one, other in pairs) / largest


def main() -> None:
    """Trains in all sequences, and saves errors and digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    names = [*SEQUENCES, KILLS]
    table: dict[str, dict[str, Any]] = {form: {} for form in FORMS}
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for same_bits, name in itertools.product((False, True), names):
            folder = Path(temporary) / f"{same_bits}-{name}"
            found[name, same_bits] = run_sequence(name, folder, deterministic=same_bits)
    for form in FORMS:
        for name in names:
            plain, deterministic = found[name, False][form], found[name, True][form]
            table[form][name] = {
                "error": error(plain, found["1", False][form]),
                "digest": deterministic["digest"],
                "history is the same": deterministic["history"] == found["1", True][form]["history"],
            }
            print(form, name, table[form][name], flush=True)
    RESULTS.write_text(json.dumps({"By form and sequence of worlds": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
