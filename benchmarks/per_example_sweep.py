"""What norms and clipped updates cost over the shapes that layers come in: `python benchmarks/per_example.py sweep`.

Each point is a small model in which two layers of one shape do most of the work. They follow on a layer with weights,
so that both have an input gradient, as most layers of a model have.
"""

import json
import statistics
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from models import endless, loss_of

from keras_paragrad import wrap

WAYS = {"plain": None, "norms": {}, "clipped": {"clip_norm": 1.0}}
ROUNDS = 5
# Seconds of each block of steps.
BLOCK = 0.15


class Point(NamedTuple):
    """A shape, and how its layers are made.

    Attributes:
        rule: The kind of layer.
        shape: The shape in words.
        inputs: The shape of the model's inputs, without the batch.
        batch: How many examples a batch has.
        layers: Makes the layers before the classifier.
        optimizer: The name of the optimizer.
    """

    rule: str
    shape: str
    inputs: tuple
    batch: int
    layers: object
    optimizer: str = "sgd"


def images(rule, kernel, stride, channels, pixels, batch=64):
    """Two layers on images; on three channels, the first of them is the model's first layer."""
    filters = max(channels, 16)
    options = {"strides": stride, "padding": "same", "activation": "relu"}

    def one():
        if rule == "depthwise":
            return keras.layers.DepthwiseConv2D(kernel, **options)
        kind = keras.layers.SeparableConv2D if rule == "separable" else keras.layers.Conv2D
        return kind(filters, kernel, **options)

    def layers():
        stem = [] if channels == 3 else [keras.layers.Conv2D(channels, 1, activation="relu")]
        return [*stem, one(), one(), keras.layers.GlobalAveragePooling2D()]

    shape = f"{kernel}x{kernel}, stride {stride}, {channels} channels, {pixels} pixels"
    return Point(rule, shape, (pixels, pixels, 3), batch, layers)


class Attended(keras.layers.Layer):
    """Self-attention."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(4, 16)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, inputs):
        return self.attention(inputs, inputs)


def sequences(rule, length, batch=32):
    """Two layers on sequences of 64 features."""

    def layers():
        made = [Attended() if rule == "attention" else keras.layers.Dense(64, activation="relu") for _ in range(2)]
        return [keras.layers.Dense(64, activation="relu"), *made, keras.layers.GlobalAveragePooling1D()]

    return Point(rule, f"sequences of {length}", (length, 64), batch, layers)


def strided_cnn():
    """Three convolutions, each normalized."""

    def layers():
        made = []
        for filters, stride in ((32, 1), (64, 2), (64, 2)):
            made.append(keras.layers.Conv2D(filters, 3, strides=stride, padding="same", activation="relu"))
            made.append(keras.layers.GroupNormalization(8))
        return [*made, keras.layers.GlobalAveragePooling2D()]

    return Point("model", "CNN of 32, 64, 64 channels, strides 1, 2, 2, Adam", (32, 32, 3), 64, layers, "adam")


POINTS = [
    strided_cnn(),
    *(images("convolution", *shape) for shape in ((3, 1, 3, 32), (3, 2, 3, 64), (7, 2, 3, 64))),
    *(images("convolution", *shape) for shape in ((1, 1, 16, 32), (1, 2, 64, 32), (1, 1, 256, 8))),
    *(images("convolution", *shape) for shape in ((3, 1, 16, 32), (3, 2, 32, 32), (3, 1, 64, 16), (3, 2, 64, 16))),
    *(images("convolution", *shape) for shape in ((3, 1, 64, 8), (3, 1, 256, 8, 16), (7, 1, 16, 16), (7, 2, 32, 32))),
    *(images("depthwise", *shape) for shape in ((3, 1, 32, 32, 16), (3, 2, 64, 16, 32), (7, 1, 64, 16, 16))),
    *(images("separable", *shape) for shape in ((3, 1, 32, 32, 16), (3, 2, 64, 16, 32))),
    *(sequences(rule, length) for rule in ("dense", "attention") for length in (16, 128, 512)),
]


def fitted(point, options, jit):
    """A function that trains a point's model for a number of steps; plain if `options` is `None`, or else wrapped."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(point.inputs), *point.layers(), keras.layers.Dense(10)])
    if options is not None:
        model = wrap(model, **options)
    model.compile(point.optimizer, loss_of(), jit_compile=jit)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(point.batch, *point.inputs)).astype("float32")
    data = endless(x, generator.integers(0, 10, point.batch))
    return lambda steps: model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)


def measured(point, jit, clock):
    """Milliseconds of a plain step, and for each other way the median ratio to the plain steps of the same round.

    `clock` returns seconds.
    """
    fits = {way: fitted(point, options, jit) for way, options in WAYS.items()}
    for fit in fits.values():
        fit(2)
    start = time.perf_counter()
    fits["plain"](3)
    steps = max(3, int(BLOCK / (time.perf_counter() - start) * 3))
    times = {way: [] for way in fits}
    for _ in range(ROUNDS):
        for way, fit in fits.items():
            start = clock()
            fit(steps)
            times[way].append((clock() - start) / steps * 1e3)
    keras.backend.clear_session()
    ratios = {
        way: statistics.median(ours / plain for ours, plain in zip(times[way], times["plain"], strict=True))
        for way in WAYS
        if way != "plain"
    }
    return statistics.median(times["plain"]), ratios


def print_points(by_processor_time, words=""):
    """Runs in a separate process; prints a JSON line for each point whose rule and shape contain the words."""
    clock = time.perf_counter
    if by_processor_time:
        clock = time.process_time
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    for point in POINTS:
        if words not in f"{point.rule} {point.shape}":
            continue
        for jit in (False, True):
            plain, ratios = measured(point, jit, clock)
            line = {"rule": point.rule, "shape": point.shape, "jit": "on" if jit else "off", "plain": plain, **ratios}
            print(json.dumps(line), flush=True)
