"""Prints what training takes on the batch that `find_batch_size` has found, and its limit, in bytes."""

import json

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad import find_batch_size
from keras_paragrad.memory.available import resident_bytes

LIMIT = 700_000_000


def made():
    hidden = [keras.layers.Dense(512, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    return model


tf.reduce_sum(tf.ones((8, 8))).numpy()
before = resident_bytes()
model = made()
x, y = np.ones((64, 64), "float32"), np.ones((64, 1), "float32")
found = find_batch_size(model, x, y, device_bytes=LIMIT, max_batch_size=2**17, verbose=0)
x, y = np.ones((found, 64), "float32"), np.ones((found, 1), "float32")
model.fit(x, y, batch_size=found, epochs=2, verbose=0)
print(json.dumps({"seen": resident_bytes(peak=True) - before, "limit": LIMIT}))
