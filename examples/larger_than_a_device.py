"""Trains a Transformer that is too large for any of four devices, by one changed line: each device holds a shard of it.

    python examples/larger_than_a_device.py

Four logical CPU devices stand in for GPUs. TensorFlow has 120 MB for their tensors, which is 30 MB each; the weights
and Adam's moments alone take 31 MB. So that the second training begins with empty memory, each has its own process.
The picture shows what a device would have to hold, as `dist.estimate` says. It takes a minute on two CPU cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from _example import ENVIRONMENT, Progress, bars, options, require, save

require("matplotlib")

DEVICES, MEGABYTES = 4, 120
WORDS, TOKENS, WIDTH, BLOCKS, HEADS = 4000, 16, 256, 2, 8
BATCH, BATCHES, EPOCHS = 16, 4, 3
LIMITS = {
    **ENVIRONMENT,
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(MEGABYTES),
    # It would have memory of its own.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
TRAININGS = {"none": "whole on each device", "parameters": "in shards"}


def transformer():
    """Says whether more than half of a text's words are of the rarer half of the vocabulary."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(BLOCKS):
        hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(hidden, hidden))
        inner = layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(WIDTH)(inner))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))


def train(shard, epochs, progress):
    """Trains on all devices, says how it went, and returns what a device holds in either way, in MB."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_paragrad import DistributedFit

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    x = np.random.default_rng(0).integers(0, WORDS, (BATCH * BATCHES, TOKENS))
    y = (x >= WORDS // 2).mean(axis=1, keepdims=True) > 0.5

    # The changed line: shard is None, or "parameters".
    dist = DistributedFit("mirrored", [f"CPU:{index}" for index in range(DEVICES)], shard=shard)
    with dist.scope():
        model = transformer()
        model.compile(keras.optimizers.Adam(1e-4), keras.losses.BinaryCrossentropy(from_logits=True))
    callbacks = [progress.callback()]
    try:
        losses = dist.fit(model, x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks).history["loss"]
    except tf.errors.ResourceExhaustedError as error:
        wanted = next(line for line in str(error).splitlines() if "OOM" in line)
        print(f"shard={shard!r}: out of memory. {wanted[wanted.index('OOM') :][:70]}", flush=True)
        return None
    print(f"shard={shard!r}: trained, loss of each epoch", *(f"{loss:.3f}" for loss in losses), flush=True)
    estimate = dist.estimate(model, BATCH)
    columns = {name: estimate[None if name == "none" else name] for name in TRAININGS}
    # A device's limit doesn't count the graph.
    return {name: (column.total - column.graph) / 1e6 for name, column in columns.items()}


def main():
    """Trains as replicas, and then in shards."""
    if "--train" in sys.argv:
        shard, epochs, result = sys.argv[2:]
        shard, epochs = None if shard == "none" else shard, int(epochs)
        with Progress(f"shard={shard!r}", epochs * BATCHES) as progress:
            Path(result).write_text(json.dumps(train(shard, epochs, progress)))
        sys.stdout.flush()
        # After it has run out of memory, TensorFlow can take minutes to end.
        os._exit(0)
    given = options(__doc__, takes="a minute")
    print(f"{DEVICES} devices with {MEGABYTES // DEVICES} MB each", flush=True)
    result = given.folder / "held.json"
    for shard in TRAININGS:
        epochs = 1 if given.short else EPOCHS
        command = [sys.executable, "-W", "ignore", __file__, "--train", shard, str(epochs), str(result)]
        subprocess.run(command, env={**os.environ, **LIMITS}, check=True)
    held = {TRAININGS[name]: megabytes for name, megabytes in json.loads(result.read_text()).items()}
    title = "What a device holds at the peak of a training step, as estimated, in MB"
    save(
        bars(title, held, "{:.0f} MB", limit=("a device's memory", MEGABYTES / DEVICES)),
        given.folder / "memory.png",
        "Whole, the model fits on none of the four devices; with shard='parameters' it trains on them.",
    )


if __name__ == "__main__":
    main()
