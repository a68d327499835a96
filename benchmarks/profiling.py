"""What profiling costs: each callback beside plain `fit` and Keras's TensorBoard callback, and the time of the report.

`python benchmarks/profiling.py` prints the tables and saves them in `results/profiling.json`.
"""

import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# As `harness` does, which is imported after TensorFlow here.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
from harness import report
from interleave import in_turns
from models import batch_of, endless, loss_of, model_of
from sizes import MODELS

from keras_paragrad import GradientTelemetry, Profiler, ProfileSchedule, Throughput, write_report

NAME = "profiling"
TITLES = {"small": "MLP 784-64-64-10, batch of 128", **{name: MODELS[name] for name in ("mlp", "cnn")}}
BLOCKS = 40
# In how many rounds new models are made: where weights lie in memory is worth some microseconds of a short step.
ROUNDS = {"small": 8, "mlp": 1, "cnn": 1}
TRACED, REPORTS = 20, 5
# An idle Profiler logs that it has traced nothing.
logging.getLogger("keras_paragrad").setLevel(logging.ERROR)


class Nothing(keras.callbacks.Callback):
    """A callback that does nothing, to measure what one more callback takes beside the one that measures."""

    def on_train_batch_end(self, batch, logs=None):
        """Does nothing."""


def trained(name, jit_compile):
    """A compiled model: one that other benchmarks use too, or one whose step takes about half a millisecond."""
    if name == "small":
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    else:
        model = model_of(name)
    model.compile("adam", loss_of(), jit_compile=jit_compile)
    return model


def data_of(name):
    return endless(*batch_of("mlp" if name == "small" else name))


def groups(folder):
    """Two groups of cases that take turns: by name, a function that makes the callbacks of a `fit`."""

    def place(name):
        return str(Path(folder, name.replace(" ", "_")))

    idle = ProfileSchedule(skip_first=10**9)
    plain = {"plain": lambda name: []}
    ours = {
        # Plain twice, to show how precise the figures of the others are.
        "plain again": lambda name: [],
        "a callback that does nothing": lambda name: [Nothing()],
        "Profiler, idle": lambda name: [Profiler(place(name), schedule=idle)],
        # Its figures are updated once per second of its own training, which is one of seven that take turns.
        "Throughput": lambda name: [Throughput(place(name), interval=7.0)],
        "GradientTelemetry, every 10 steps": lambda name: [GradientTelemetry(place(name), every=10)],
        "GradientTelemetry, every step": lambda name: [GradientTelemetry(place(name), every=1)],
    }
    # Its thread goes on writing in the next training's turn, so it takes turns with the plain one alone.
    tensorboard = {"TensorBoard of Keras": lambda name: [keras.callbacks.TensorBoard(place(name))]}
    return {**plain, **ours}, {**plain, **tensorboard}


def step_times(name, jit_compile, cases):
    """By case, the microseconds of a step in each block of all rounds."""
    rounds = [times_of_round(name, jit_compile, cases) for _ in range(ROUNDS[name])]
    return {case: np.concatenate([times[case] for times in rounds]) for case in cases}


def times_of_round(name, jit_compile, cases):
    """By case, the microseconds of a step in each block."""
    data = data_of(name)

    def training(case, make):
        def train(turn, steps):
            model = trained(name, jit_compile)
            model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[turn, *make(case)])

        return train

    return in_turns({case: training(case, make) for case, make in cases.items()}, BLOCKS)


def report_cost(jit_compile):
    """Seconds to write the report of a short trace with our summary of it, and without; and the report's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = ProfileSchedule(skip_first=10, active=TRACED)
        callbacks = [Profiler(folder, schedule=schedule, summary=False, report=None), Throughput(folder)]
        callbacks.append(GradientTelemetry(folder, every=1))
        trained("mlp", jit_compile).fit(
            data_of("mlp"), steps_per_epoch=10 + 2 * TRACED, shuffle=False, verbose=0, callbacks=callbacks
        )
        ours = timed(lambda: write_report(folder))
        size = write_report(folder).stat().st_size
        for path in Path(folder).rglob("keras_paragrad.json"):
            path.unlink()
        return ours, timed(lambda: write_report(folder)), size


def timed(write):
    """The median time of several calls, in seconds; the first, which loads libraries, is one of them."""
    times = []
    for _ in range(REPORTS):
        begin = time.perf_counter()
        write()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def report_cost_of(name, title):
    """Reports what each callback adds to a step of a model."""
    for jit_compile in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found = [step_times(name, jit_compile, cases) for cases in groups(folder)]
        rows = [row for times in found for row in rows_of(times)]
        title_of_table = f"{title}, Adam, jit {'on' if jit_compile else 'off'}: a step of fit, and what it takes more"
        report(NAME, title_of_table, ["", "ms a step", "µs more (quartiles)", "of plain"], rows)


def rows_of(times):
    """Yields a row for each case: what a step takes, and how much more than the plain one that took turns with it."""
    plain = float(np.median(times["plain"]))
    for case, took in times.items():
        low, added, high = np.percentile(took - times["plain"], (25, 50, 75))
        share = f"{added / plain:+.1%}"
        yield [case, float(np.median(took)) / 1e3, f"{added:.0f} ({low:.0f} to {high:.0f})", share]


def report_reports():
    """Reports how long it takes to write a report."""
    rows = []
    for jit_compile in (False, True):
        ours, foreign, size = report_cost(jit_compile)
        rows.append([f"jit {'on' if jit_compile else 'off'}", ours, foreign, size / 1e3])
    columns = ["", "from our summary, s", "from the trace alone, s", "kB"]
    report(NAME, f"The report of a trace of {TRACED} steps, with telemetry and throughput", columns, rows)


def main():
    for name, title in TITLES.items():
        report_cost_of(name, title)
    report_reports()


if __name__ == "__main__":
    main()
