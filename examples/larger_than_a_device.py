"""Trains a Transformer that is too large for any of four devices, by one changed line: each device holds a shard of it.

Four logical CPU devices stand in for GPUs. TensorFlow has 1200 MB for their tensors, which is 300 MB each; the weights
and Adam's moments alone take 352 MB. So that the second training begins with empty memory, each has its own process.
"""

import os
import subprocess
import sys
import time

DEVICES, MEGABYTES = 4, 1200
WORDS, TOKENS, WIDTH, BLOCKS, HEADS = 4000, 16, 1024, 2, 8
BATCH, BATCHES, EPOCHS = 16, 4, 3
ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(MEGABYTES),
    # It would have memory of its own.
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


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


def train(shard):
    """Trains on all devices, and prints how it went."""
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
    start = time.perf_counter()
    try:
        losses = dist.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0).history["loss"]
    except tf.errors.ResourceExhaustedError as error:
        wanted = next(line for line in str(error).splitlines() if "OOM" in line)
        print(f"shard={shard!r}: out of memory. {wanted[wanted.index('OOM') :][:70]}", flush=True)
        return
    shown = " ".join(f"{loss:.3f}" for loss in losses)
    print(f"shard={shard!r}: trained in {time.perf_counter() - start:.0f} s, loss of each epoch {shown}", flush=True)


def main():
    """Trains as replicas, and then in shards."""
    if sys.argv[1:]:
        train(None if sys.argv[1] == "none" else sys.argv[1])
        return
    print(f"{DEVICES} devices with {MEGABYTES // DEVICES} MB each", flush=True)
    for shard in ("none", "parameters"):
        command = [sys.executable, "-W", "ignore", __file__, shard]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)


if __name__ == "__main__":
    main()
