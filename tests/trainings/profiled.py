"""Trainings to profile, and what xprof's own tools say about their traces."""

import contextlib
import io
import json
import logging
import resource
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from xprof.convert.raw_to_tool_data import xspace_to_tool_data

from keras_paragrad import DistributedFit
from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.tracer import Profiler

ROWS = 16


def model(optimizer="adam", units=32, **options):
    made = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(units, "relu", name="first"),
            keras.layers.Dense(units, "relu", name="first_1"),
            keras.layers.Dense(4, name="last"),
        ]
    )
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return made


def arrays(batches):
    generator = np.random.default_rng(0)
    rows = batches * ROWS
    return generator.normal(size=(rows, 16)).astype("float32"), generator.integers(0, 4, rows)


def dataset(batches, known=True, milliseconds=0.0):
    """Batches, each of which takes some time to make."""

    def slowly(x):
        time.sleep(milliseconds / 1e3)
        return x

    data = tf.data.Dataset.from_tensor_slices(arrays(batches)).batch(ROWS)
    if milliseconds:
        data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(slowly, [x], tf.float32), (None, 16)), y))
    return data if known else data.filter(lambda x, y: True)


class Worker(NamedTuple):
    """What a worker found and said."""

    windows: int
    printed: str
    logged: list[str]


class SlowSecond(keras.callbacks.Callback):
    """Asks the second worker for a window, and slows it down."""

    # Otherwise the first worker would wait in an all-reduce after the batch, which no trace of a step has.
    changes_training = False

    def __init__(self, profiler):
        super().__init__()
        self.profiler = profiler

    def on_train_batch_end(self, batch, logs=None):
        if self.model.distribute_strategy.cluster_resolver.task_id == 1:
            time.sleep(0.02)
            if batch == 3:
                self.profiler.trace_now()


def profiled_by_worker(arguments):
    """Profiles a training with another worker; called in a process of its own.

    Args:
        arguments: The log directory, and the batches in a call.

    Returns:
        A `Worker`.
    """
    log_dir, per_call = arguments
    said = logged()
    dist = DistributedFit(startup_timeout=60)
    with dist.scope():
        training = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, name="hidden"), keras.layers.Dense(1)])
        training.compile("adam", "mse", steps_per_execution=per_call)
    x = np.random.default_rng(0).normal(size=(330, 6)).astype("float32")
    schedule = ProfileSchedule(skip_first=6, warmup=1, active=8, repeat=3)
    callback = Profiler(log_dir, schedule, report=None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        dist.fit(training, x, x[:, :1], batch_size=10, verbose=0, callbacks=[SlowSecond(callback), callback])
    return Worker(len(callback.summaries), printed.getvalue(), said)


def logged():
    """A list of what the package logs from here on."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("keras_paragrad").addHandler(handler)
    return said


def trained_on_a_full_disk(log_dir):
    """Profiles a training while no file may grow; called in a process of its own.

    Args:
        log_dir: Where the profile would be.

    Returns:
        The updates made, the windows that were traced, and what was logged of it.
    """
    said = logged()
    schedule = ProfileSchedule(skip_first=4, warmup=1, active=4)
    callback = Profiler(log_dir, schedule, summary=False, report=None)
    training = model()
    # No file may grow beyond this, as on a disk with so much left.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    training.fit(dataset(16), shuffle=False, verbose=0, callbacks=[callback])
    return int(training.optimizer.iterations.numpy()), len(callback.summaries), said


def write_trace(folder, threads):
    """Writes a trace by hand.

    Args:
        folder: Where to.
        threads: By a thread's name, its events: each with its name, beginning and end in microseconds, and statistics.
    """
    space = xplane_pb2.XSpace(hostnames=["by_hand"])
    plane = space.planes.add(name="/host:CPU")
    numbers = {}

    def number(names, name):
        found = numbers.setdefault(name, len(numbers) + 1)
        names[found].id, names[found].name = found, name
        return found

    for index, (thread, events) in enumerate(threads.items()):
        line = plane.lines.add(id=index, display_id=index, name=thread)
        for name, begin, end, stats in events:
            event = line.events.add(
                metadata_id=number(plane.event_metadata, name),
                offset_ps=begin * 1_000_000,
                duration_ps=(end - begin) * 1_000_000,
            )
            for key, value in stats.items():
                field = "str_value" if isinstance(value, str) else "int64_value"
                event.stats.add(metadata_id=number(plane.stat_metadata, key), **{field: value})
    (folder / "by_hand.xplane.pb").write_bytes(space.SerializeToString())


def table(folder, tool, column):
    """The rows of the table with a column, as xprof prints it."""
    files = [str(path) for path in folder.glob("*.xplane.pb")]
    for each in json.loads(xspace_to_tool_data(files, tool, {})[0]):
        names = [found["id"] for found in each.get("cols", [])]
        if column in names:
            return [dict(zip(names, [cell["v"] for cell in row["c"]], strict=True)) for row in each["rows"]]
    raise AssertionError(f"{tool} has no table with {column}")
