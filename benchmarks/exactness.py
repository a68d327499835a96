"""How far weights trained with accumulation are from whole batches': Keras's built-in and ours, on Fashion-MNIST.

`python benchmarks/exactness.py` prints the table of the README and saves it in `results/exactness.json`.
"""

import contextlib
import logging
import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# As `harness` does, which is imported after TensorFlow here.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import keras
import numpy as np
import tensorflow as tf
from harness import fashion_mnist, report

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

ROWS, MICRO_BATCH, STEPS, EPOCHS = 1000, 64, 4, 2
logging.getLogger("keras_paragrad").setLevel(logging.ERROR)


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(1e-3, decay_steps=2, decay_rate=0.7)


# By name: the number of images, the inner optimizer's arguments, whether weighted, and whether on two replicas.
CASES = {
    "even micro-batches, Adam": (768, {}, False, False),
    "an uneven last micro-batch": (ROWS, {}, False, False),
    "weighted examples, weighted mean": (ROWS, {}, True, False),
    "learning-rate schedule": (768, {"learning_rate": decaying}, False, False),
    "moving average of the weights": (768, {"use_ema": True, "ema_momentum": 0.9}, False, False),
    "two replicas": (768, {}, False, True),
    "two replicas, clipnorm, uneven, weighted": (ROWS, {"clipnorm": 0.1}, True, True),
}


def train(case, way):
    """The weights after training a case in a way: `"whole"` batches, Keras's `"built-in"` accumulation, or `"ours"`."""
    rows, arguments, weighted, replicas = CASES[case]
    arguments = {"learning_rate": 1e-3, **arguments}
    if callable(arguments["learning_rate"]):
        arguments["learning_rate"] = arguments["learning_rate"]()
    more = {"gradient_accumulation_steps": STEPS} if way == "built-in" else {}
    x, y = fashion_mnist(rows)
    weights = np.random.default_rng(0).uniform(0.1, 3, rows).astype("float32") if weighted else None
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    split = replicas and way != "whole"
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope() if split else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.Adam(**arguments, **more)
        if way == "ours":
            optimizer = AccumulatingOptimizer(optimizer, STEPS)
        hidden, out = keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(10)
        model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), hidden, out])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        model.compile(optimizer, loss)
    model.fit(
        x,
        y,
        MICRO_BATCH * STEPS if way == "whole" else MICRO_BATCH,
        sample_weight=weights,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[ExactAccumulation()] if way == "ours" else [],
    )
    return model.get_weights()


def print_difference(case, way):
    """Runs in a separate process; prints the largest difference of a weight from whole batches, or an error's name."""
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    whole = train(case, "whole")
    try:
        found = train(case, way)
    except RuntimeError as error:
        print(type(error).__name__)
        return
    print(max(float(np.abs(a - b).max()) for a, b in zip(whole, found, strict=True)))


def difference(case, way):
    """What `print_difference` prints in a separate process, rounded."""
    command = [sys.executable, __file__, case, way]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()[-1]
    return printed if printed.endswith("Error") else f"{float(printed):.1e}"


def main():
    if sys.argv[1:]:
        print_difference(*sys.argv[1:])
        return
    rows = [[case, difference(case, "built-in"), difference(case, "ours")] for case in CASES]
    report(
        "exactness",
        "Largest difference from the weights that whole batches give, Fashion-MNIST, k=4",
        ["", "gradient_accumulation_steps", "AccumulatingOptimizer"],
        rows,
    )


if __name__ == "__main__":
    main()
