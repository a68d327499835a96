"""Prints what training a model is estimated to take, and what it was seen to take, in bytes."""

import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.memory import estimate_memory

ROWS = 24_000


def resident(line):
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(each for each in status if each.startswith(line)).split()[1])


def train(width, rows):
    """Trains on what counts as the process's own before."""
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(12)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
    # With one, TensorFlow may put off kernels' gradients in Keras 3.16's step, as docs/guides/memory.md says.
    model.compile("adam", "mse", jit_compile=False, steps_per_execution=2)
    batch = tf.constant(np.ones((rows, 64), "float32")), tf.constant(np.ones((rows, 1), "float32"))
    data = tf.data.Dataset.from_tensors(batch).repeat(2)
    # The batch itself is estimated.
    before = resident("VmRSS") - rows * 65 * 4
    model.fit(data, verbose=0)
    return model, before


train(8, 8)
model, before = train(256, ROWS)
column = estimate_memory(model, ROWS)[None]
# The first model has taken the memory of the graph.
print(json.dumps({"seen": resident("VmHWM") - before, "estimated": column.total - column.graph}))
