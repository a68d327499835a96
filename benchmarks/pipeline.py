"""How far the stages of a pipeline overlap: layers that sleep, and layers that compute.

`python benchmarks/pipeline.py` prints two tables and saves them in `results/pipeline.json`.

Stages that sleep take no processor, so that two cores are enough to see whether TensorFlow runs stages at the same
time. Each device does one thing at a time. The devices of a stage are its columns, which take turns with micro-batches.
A step's ideal time is (m + s - 1) times the time of a micro-batch in a stage, for m micro-batches of a column and s
stages (GPipe); without overlap it is that time for each micro-batch and stage.

Stages that compute do so on as many cores as there are, each operation on one of them. So only as many stages as
there are cores can overlap. The bubble is measured by `Profiler`: the share of the time between the first and the last
operation of the stages in which a stage runs nothing.
"""

import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import report

# Seconds that a stage takes for a micro-batch, in the forward and again in the backward pass.
SLEEP = 0.05
# Stages, and devices for each.
SHAPES, MICROBATCHES, STEPS = ((2, 1), (4, 1), (2, 2)), (1, 2, 4, 8), 5
# For stages that compute: the layers of each, their width, and the rows of a batch.
DEEP, WIDTH, ROWS = 4, 512, 2048


def pipeline_of(stages, columns, microbatches):
    """A `DistributedFit` on logical devices of the CPU, which cuts a model at its layers `stage_0`, `stage_1`, ..."""
    import tensorflow as tf

    from keras_paragrad import DistributedFit
    from keras_paragrad.distribution import Pipeline

    logical = [tf.config.LogicalDeviceConfiguration()] * (stages * columns)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    devices = [[f"CPU:{stage * columns + column}" for column in range(columns)] for stage in range(stages)]
    cuts = [f"stage_{index}" for index in range(stages - 1)]
    return DistributedFit(Pipeline(cuts=cuts, microbatches=microbatches), devices=devices)


def times_of(model, rows, targets):
    """The seconds of each of `STEPS` steps after the first, which traces."""
    model.train_on_batch(rows, targets)
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        model.train_on_batch(rows, targets)
        seconds.append(time.perf_counter() - begin)
    return seconds


def sleeping(stages, columns, microbatches):
    """Runs in a separate process; returns the seconds of some steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    # Sleeping operations hold threads.
    tf.config.threading.set_inter_op_parallelism_threads(4 * stages * columns)
    locks = collections.defaultdict(threading.Lock)

    def sleep(tensor):
        """Sleeps on the tensor's device, which does one thing at a time."""
        lock = locks[tf.identity(tensor).device]

        def passed(values):
            with lock:
                time.sleep(SLEEP)
            return values

        slept = tf.numpy_function(passed, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(slept, tensor.shape)

    class Sleeps(keras.layers.Layer):
        """Multiplies by a weight, and sleeps in the forward and in the backward pass."""

        def build(self, shape):
            self.weight = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs):
            @tf.custom_gradient
            def slowly(tensor):
                return sleep(tensor), sleep

            return slowly(inputs * self.weight)

    dist = pipeline_of(stages, columns, microbatches)
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), *(Sleeps(name=f"stage_{index}") for index in range(stages))])
        model.compile("sgd", "mse")
    dist.prepare(model)
    rows = np.ones((8, 4), "float32")
    return times_of(model, rows, rows)


def computing(stages, columns, microbatches):
    """Runs in a separate process; returns the seconds of steps, and the bubble that the profiler measures."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_paragrad import Profiler, ProfileSchedule

    tf.config.threading.set_intra_op_parallelism_threads(1)
    dist = pipeline_of(stages, columns, microbatches)

    def build():
        keras.utils.set_random_seed(0)
        hidden = inputs = keras.Input((WIDTH,))
        for stage in range(stages):
            for _ in range(DEEP - 1):
                hidden = keras.layers.Dense(WIDTH, "tanh")(hidden)
            hidden = keras.layers.Dense(WIDTH, "tanh", name=f"stage_{stage}")(hidden)
        model = keras.Model(inputs, hidden)
        model.compile("sgd", "mse")
        return model

    rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    alone = times_of(build(), rows, rows)
    with dist.scope():
        model = build()
    dist.prepare(model)
    seconds = times_of(model, rows, rows)
    with tempfile.TemporaryDirectory() as folder:
        schedule = ProfileSchedule(skip_first=2, warmup=0, active=STEPS)
        profiler = Profiler(folder, schedule, summary=False, report=None)
        data = tf.data.Dataset.from_tensors((rows, rows)).cache().repeat(STEPS + 3)
        model.fit(data, verbose=0, callbacks=[profiler])
        seen = json.loads(next(Path(folder).rglob("keras_paragrad.json")).read_text())["pipeline"]
    return {"alone": alone, "step": seconds, "bubble": seen["bubble"], "ideal": seen["ideal"]}


def result_of(kind, *shape):
    """What `sleeping` or `computing` returns in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, kind, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def row_of_sleeping(stages, columns, microbatches):
    """A row: times of the step, ideal and without overlap; ideal to step; measured and ideal share of waiting."""
    step = statistics.median(result_of("sleeping", stages, columns, microbatches))
    # The seconds of a micro-batch in a stage, forward and backward, and the micro-batches of a column.
    both, passes = 2 * SLEEP, -(-microbatches // columns)
    ideal, serial = (passes + stages - 1) * both, microbatches * stages * both
    bubble = (stages - 1) / (passes + stages - 1)
    milliseconds = [round(1e3 * each) for each in (step, ideal, serial)]
    return [stages, columns, microbatches, *milliseconds, ideal / step, 1 - passes * both / step, bubble]


def row_of_computing(stages, columns, microbatches):
    """A row: times of the step and on one device, their ratio, the measured and the ideal share of waiting."""
    found = result_of("computing", stages, columns, microbatches)
    milliseconds = [round(1e3 * statistics.median(found[name])) for name in ("step", "alone")]
    ratio = milliseconds[0] / milliseconds[1]
    return [stages, columns, microbatches, *milliseconds, ratio, found["bubble"], found["ideal"]]


def main():
    """Measures, prints and saves."""
    shapes = [(*shape, microbatches) for shape in SHAPES for microbatches in MICROBATCHES if microbatches >= shape[1]]
    columns = ["stages", "devices each", "micro-batches", "step"]
    title = f"Milliseconds a step of stages that sleep {1e3 * SLEEP:.0f} ms of a micro-batch, forward and backward"
    more = ["ideal", "one after another", "ideal to step", "waiting", "of the ideal"]
    report("pipeline", title, [*columns, *more], [row_of_sleeping(*shape) for shape in shapes])
    title = f"Milliseconds a step of stages of {DEEP} Dense({WIDTH}), {ROWS} rows, {os.cpu_count()} cores"
    more = ["one device", "step to one device", "waiting", "of the ideal"]
    report("pipeline", title, [*columns, *more], [row_of_computing(*shape) for shape in shapes])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run = {"sleeping": sleeping, "computing": computing}[sys.argv[1]]
        print(json.dumps(run(*map(int, sys.argv[2:]))))
    else:
        main()
