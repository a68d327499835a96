"""How far the stages of a pipeline overlap: layers that sleep, one micro-batch at a time on each device.

`python benchmarks/pipeline.py` prints a table and saves it in `results/pipeline.json`. Sleeping takes no processor, so
that two cores are enough to see whether TensorFlow runs stages at the same time. A step's ideal time is (m + s - 1)
times that of a micro-batch in a stage, for m micro-batches and s stages (GPipe); without overlap it is m * s times.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from harness import report

# Seconds that a stage takes of a micro-batch, in the forward and in the backward pass.
SLEEP = 0.05
STAGES, MICROBATCHES, STEPS = (2, 4), (1, 2, 4, 8), 5


def print_times(stages, microbatches):
    """Runs in a process of its own: the seconds of some steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_paragrad import DistributedFit
    from keras_paragrad.distribution import Pipeline

    # Sleepers hold threads.
    tf.config.threading.set_inter_op_parallelism_threads(4 * stages)
    logical = [tf.config.LogicalDeviceConfiguration()] * stages
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)

    class Sleeps(keras.layers.Layer):
        """A product by a weight that takes its time, on a device that does one thing at a time."""

        def build(self, shape):
            self.weight = self.add_weight(shape=(), initializer="ones")
            self.lock = threading.Lock()

        def call(self, inputs):
            def passed(values):
                with self.lock:
                    time.sleep(SLEEP)
                return values

            def sleep(tensor):
                slept = tf.numpy_function(passed, [tensor], tensor.dtype, stateful=False)
                return tf.ensure_shape(slept, tensor.shape)

            @tf.custom_gradient
            def slowly(tensor):
                return sleep(tensor), sleep

            return slowly(inputs * self.weight)

    dist = DistributedFit(
        Pipeline(cuts=[f"stage_{index}" for index in range(stages - 1)], microbatches=microbatches),
        devices=[f"CPU:{index}" for index in range(stages)],
    )
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), *(Sleeps(name=f"stage_{index}") for index in range(stages))])
        model.compile("sgd", "mse")
    dist.prepare(model)
    rows = np.ones((8, 4), "float32")
    model.train_on_batch(rows, rows)
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        model.train_on_batch(rows, rows)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds))


def row_of(stages, microbatches):
    command = [sys.executable, "-W", "ignore", __file__, str(stages), str(microbatches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    step = statistics.median(json.loads(done.stdout.splitlines()[-1]))
    both = 2 * SLEEP
    ideal, serial = (microbatches + stages - 1) * both, microbatches * stages * both
    bubble = (stages - 1) / (microbatches + stages - 1)
    milliseconds = [round(1e3 * each) for each in (step, ideal, serial)]
    return [stages, microbatches, *milliseconds, ideal / step, 1 - microbatches * both / step, bubble]


def main():
    """Measures, prints and saves."""
    rows = [row_of(stages, microbatches) for stages in STAGES for microbatches in MICROBATCHES]
    title = f"Milliseconds a step of stages that sleep {1e3 * SLEEP:.0f} ms of a micro-batch, forward and backward"
    columns = [
        "stages",
        "micro-batches",
        "step",
        "ideal",
        "one after another",
        "ideal to step",
        "waiting",
        "of the ideal",
    ]
    report("pipeline", title, columns, rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print_times(*map(int, sys.argv[1:]))
    else:
        main()
