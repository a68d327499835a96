"""What `Profiler` sees of steps on the device, and `Throughput`'s share of the peak."""

import importlib.util
import json
import tempfile
import time
from pathlib import Path

import keras
import tensorflow as tf

from gpu_parts.case import FAILS, HOLDS, MEASURED, Cases, Line, Machine
from gpu_parts.models import loss
from gpu_parts.timing import batches, sized
from keras_paragrad import Profiler, ProfileSchedule, Throughput

TRACED = 4
cases = Cases()


@cases("a window of Profiler", 120)
def window(machine: Machine) -> Line:
    missing = importlib.util.find_spec("xprof") is None
    schedule = ProfileSchedule(skip_first=4, active=TRACED)
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(folder, schedule, summary=False, report=None if missing else "html")
        model, rows = sized(machine, "CNN")
        model.compile("adam", loss())
        model.fit(batches(model, rows), steps_per_epoch=12, verbose=0, callbacks=[profiler])
        if missing:
            traces = list(Path(folder).rglob("*.xplane.pb"))
            text = "a trace was written; without xprof it can't be read here"
            return Line(text, MEASURED if traces else FAILS, {"traces": len(traces), "missing": ["xprof"]})
        summary = json.loads(next(Path(folder).rglob("keras_paragrad.json")).read_text())
        report = Path(folder, "report.html")
        size = report.stat().st_size if report.exists() else 0
    steps, operations = summary["steps"], summary["operations"]
    compute = sum(step["compute"] for step in steps)
    duration = sum(step["duration"] for step in steps)
    named = [each for each in operations if each.get("layer")]
    text = (
        f"{len(steps)} steps of {TRACED}, {compute / max(duration, 1e-9):.0%} of their time in operations; of "
        f"{len(operations)} kinds of operations {len(named)} name their layer; a report of {size / 1e3:.0f} kB"
    )
    right = len(steps) == TRACED and 0 < compute <= duration * 1.001 and operations and named and size
    return Line(text, HOLDS if right else FAILS, {"steps": len(steps), "compute": compute, "duration": duration})


@cases("Throughput's share of the peak", 90)
def share(machine: Machine) -> Line:
    peak = peak_flops(machine)
    throughput = Throughput(peak_flops=peak)
    model, rows = sized(machine, "MLP")
    model.compile(keras.optimizers.SGD(0.01), loss())
    model.fit(batches(model, rows), steps_per_epoch=machine.size(60, 8), epochs=2, verbose=0, callbacks=[throughput])
    mfu = throughput.figures.get("mfu", float("nan"))
    text = f"{mfu:.1%} of {peak / 1e12:.3g} TFLOP/s, which a product of matrices reaches here"
    # A small step on a CPU is mostly waiting.
    return Line(text, HOLDS if machine.size(0.02, 0) < mfu < 1 else FAILS, {"mfu": mfu, "peak_flops": peak})


def peak_flops(machine: Machine) -> float:
    """The operations per second of a large product of matrices, in the precision of the model."""
    width, times = machine.size(8192, 512), 5
    matrix = tf.random.normal((width, width))
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)))
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        product().numpy()
        best = min(best, time.perf_counter() - began)
    return 2 * width**3 / best
