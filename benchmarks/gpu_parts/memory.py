"""The most memory that a step takes of the device, beside the estimate."""

import gc
import resource
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from models import endless

from gpu_parts.case import FAILS, HOLDS, MEASURED, Cases, Line, Machine
from gpu_parts.right_models import PairLoss
from gpu_parts.timing import PARTS, batches, compiled, large, sized
from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch, recompute, wrap

CLOSE = 0.15
# Why XLA is off: the estimate is that of the step without it.
LEFT_OUT = "scratch memory of operations, such as cuDNN's and cuBLAS's workspaces, is not in the estimate"
cases = Cases()


def peak_of(machine: Machine, model: keras.Model, data: Any, *callbacks: keras.callbacks.Callback) -> int:
    """Bytes of the device at the peak of some steps, with the weights; on CPUs, how much the process has grown."""
    if machine.cpu:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model.fit(data, steps_per_epoch=2, verbose=0, callbacks=list(callbacks))
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    tf.config.experimental.reset_memory_stats("GPU:0")
    model.fit(data, steps_per_epoch=3 * PARTS, verbose=0, callbacks=list(callbacks))
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def used(machine: Machine) -> int:
    """Bytes that earlier cases have left."""
    keras.utils.clear_session()
    gc.collect()
    return 0 if machine.cpu else tf.config.experimental.get_memory_info("GPU:0")["current"]


def line_of(machine: Machine, seen: int, estimated: int | None = None) -> Line:
    """The peak, and how far the estimate is from it."""
    mib, values = seen / 2**20, {"seen": seen, "estimated": estimated}
    if machine.cpu:
        return Line(f"{mib:.0f} MiB more than the process had taken before", MEASURED, values)
    if estimated is None:
        return Line(f"{mib:.0f} MiB", MEASURED, values)
    off = estimated / seen - 1
    text = f"{mib:.0f} MiB; estimated {estimated / 2**20:.0f} MiB, {off:+.0%}"
    # What it leaves out makes it too small, never too large.
    outcome = HOLDS if abs(off) <= CLOSE else MEASURED if off < 0 else FAILS
    return Line(text if abs(off) <= CLOSE else f"{text}: {LEFT_OUT}", outcome, values)


@cases("a whole batch: {}", 90, {name: {"name": name} for name in ("MLP", "CNN", "Transformer")})
def whole(machine: Machine, name: str) -> Line:
    left = used(machine)
    model, rows = sized(machine, name)
    compiled(machine, model, "adam", jit=False)
    estimated = DistributedFit("none").estimate(model, rows)[None].total
    return line_of(machine, peak_of(machine, model, batches(model, rows)) - left, estimated)


@cases("the large model, recompute", 90)
def recomputed(machine: Machine) -> Line:
    left = used(machine)
    model, rows = sized(machine, large(machine))
    compiled(machine, model, "adam", jit=False)
    recompute(model, every=1)
    estimated = DistributedFit("none").estimate(model, rows)[None].total
    return line_of(machine, peak_of(machine, model, batches(model, rows)) - left, estimated)


@cases("the large model, microbatch of a quarter", 90, small=False)
def sliced(machine: Machine) -> Line:
    left = used(machine)
    model, rows = sized(machine, large(machine))
    compiled(machine, model, "adam", jit=False)
    microbatch(model, size=rows // PARTS)
    estimated = DistributedFit("none").estimate(model, rows)[None].total
    return line_of(machine, peak_of(machine, model, batches(model, rows)) - left, estimated)


@cases("the large model, accumulation over four", 90, small=False)
def accumulated(machine: Machine) -> Line:
    left = used(machine)
    model, rows = sized(machine, large(machine))
    compiled(machine, model, AccumulatingOptimizer("adam", PARTS), jit=False)
    estimated = DistributedFit("none").estimate(model, rows // PARTS)[None].total
    return line_of(
        machine, peak_of(machine, model, batches(model, rows // PARTS), ExactAccumulation()) - left, estimated
    )


@cases("the large model, {}", 90, {"norms": {"options": {}}, "clipped": {"options": {"clip_norm": 1.0}}})
def per_example(machine: Machine, options: dict) -> Line:
    left = used(machine)
    model, rows = sized(machine, large(machine))
    data = batches(model, rows)
    wrapped = compiled(machine, wrap(model, **options), "adam", jit=False)
    return line_of(machine, peak_of(machine, wrapped, data) - left)


@cases("a loss that compares examples, batch of {}", 90, {"1024": {"rows": 1024}, "4096": {"rows": 4096}})
def comparing(machine: Machine, rows: int) -> Line:
    rows = machine.size(rows, 16)
    peaks = {}
    for way, size in (("slices of 64", machine.size(64, 4)), ("whole", None)):
        left = used(machine)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2, 32, 32, 3))
        hidden = inputs
        for filters in (64, 128, 256):
            hidden = keras.layers.TimeDistributed(
                keras.layers.Conv2D(machine.size(filters, 2), 3, padding="same", activation="relu")
            )(hidden)
        pooled = keras.layers.TimeDistributed(keras.layers.GlobalAveragePooling2D())(hidden)
        model = keras.Model(inputs, keras.layers.Flatten()(pooled))
        model.compile("adam", PairLoss(), jit_compile=False)
        if size:
            microbatch(model, size)
        x = np.random.default_rng(0).normal(size=(rows, 2, 32, 32, 3)).astype("float32")
        peaks[way] = peak_of(machine, model, endless(x, np.zeros(rows, "float32"))) - left
    text = ", ".join(f"{peak / 2**20:.0f} MiB {way}" for way, peak in peaks.items())
    return Line(text, MEASURED, {**peaks, "rows": rows})
