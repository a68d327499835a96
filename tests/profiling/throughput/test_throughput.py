"""`Throughput`: its figures against what was run."""

import csv
import json
import logging
import re
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from oracles.telemetry_loops import X, Y, inner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    Profiler,
    ProfileSchedule,
    write_report,
)
from keras_paragrad.profiling.session import ProfilerPauses
from keras_paragrad.profiling.telemetry import GradientTelemetry
from keras_paragrad.profiling.throughput import Throughput
from keras_paragrad.profiling.trace_windows import WindowTracer

PAUSE = 0.02
# What is left out of the figures, and no other step takes.
SECONDS_LEFT_OUT = 0.5


class Pause(keras.callbacks.Callback):
    """Makes steps last, and takes the time that the longest of the latest epoch lasted."""

    longest = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        Pause.longest, self.began = 0.0, time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        self.on_epoch_end()
        time.sleep(PAUSE)

    def on_epoch_end(self, epoch=None, logs=None):
        Pause.longest = max(Pause.longest, time.perf_counter() - self.began)
        self.began = time.perf_counter()


def fitted(throughput, model=None, optimizer="sgd", callbacks=(), data=None, batch_size=16, **more):
    model = model or inner()
    model.compile(optimizer, "mse", **{"jit_compile": False, **more})
    arguments = {"x": X, "y": Y, "batch_size": batch_size} if data is None else {"x": data}
    history = model.fit(**arguments, epochs=2, shuffle=False, verbose=0, callbacks=[Pause(), *callbacks, throughput])
    assert not hasattr(model.train_function, "ended")
    return history.history, throughput.figures


def assert_paced(figures, rows_in_a_call):
    """Each call takes the pause and little more: from the end of one to that of the next, parts of two steps."""
    slowest, fastest = rows_in_a_call / (2 * Pause.longest), rows_in_a_call / PAUSE
    assert slowest < figures["examples_per_second"] < fastest


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "more", [{}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
def test_examples_and_times(more):
    history, figures = fitted(Throughput(), **more)
    steps = more.get("steps_per_execution", 1)
    assert_paced(figures, 16 * steps)
    assert PAUSE * 1e3 / steps <= figures["step_time_p50_ms"] <= figures["step_time_p95_ms"] < 10e3
    assert figures["updates_per_second"] == pytest.approx(figures["examples_per_second"] / 16, rel=1e-6)
    assert 0 < figures["time_to_first_step_s"] < 60
    assert figures["retraces"] == 0
    assert figures["host_memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)
    assert "device_memory_bytes" not in figures
    assert history["examples_per_second"][-1] == figures["examples_per_second"]


class Recorded(keras.callbacks.Callback):
    """Sleeps longer in each epoch, and times the latest call of each batch and epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.pause, self.times, self.began = PAUSE * (epoch + 1) / 2, [], time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter() - sum(self.times) - self.began)
        time.sleep(self.pause)


def test_figures_of_an_epoch_are_not_those_of_its_last_interval():
    recorded, throughput, epochs = Recorded(), Throughput(interval=1e-6, peak_flops=1e9), []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append((recorded.times, dict(logs))))
    model = inner()
    model.compile("sgd", "mse", run_eagerly=True)
    # Five batches of 16 examples and one of 3, which is the last interval.
    model.fit(X[:83], Y[:83], batch_size=16, epochs=3, verbose=0, callbacks=[throughput, recorded, keep])
    for times, logs in epochs[1:]:
        assert logs["examples_per_second"] == pytest.approx(83 / sum(times), rel=0.5)
        assert logs["examples_per_second"] / logs["updates_per_second"] == pytest.approx(83 / 6)
        assert logs["mfu"] == pytest.approx(logs["flops_per_step"] / 16 * logs["examples_per_second"] / 1e9)
        # The step before the first has no pause in this epoch, and the median is of six.
        assert logs["step_time_p50_ms"] == pytest.approx(1e3 * np.median(times), rel=0.5)


@pytest.mark.parametrize("first", [True, False], ids=["throughput first", "last"])
def test_an_epoch_without_a_step_to_count_has_no_rates_of_an_earlier_one(first):
    throughput, kept = Throughput(), []
    model = inner()
    model.compile("sgd", "mse", jit_compile=False)
    # The third epoch's step is traced anew, out of the sight of a callback before this one.
    anew = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: len(kept) == 2 and model.make_train_function(force=True)
    )
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append({*logs}))
    callbacks = [throughput, anew, keep] if first else [anew, throughput, keep]
    model.fit(X[:16], Y[:16], batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert ["examples_per_second" in names for names in kept] == [False, True, False, True]
    assert ["step_time_p50_ms" in names for names in kept] == [False, True, False, True]


def test_accumulation_has_fewer_updates_than_steps():
    optimizer = AccumulatingOptimizer("sgd", 3)
    _, figures = fitted(Throughput(), optimizer=optimizer, callbacks=[ExactAccumulation()])
    assert_paced(figures, 16)
    assert figures["updates_per_second"] == pytest.approx(figures["examples_per_second"] / 48, rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4], ids=["steps=1", "steps=4"])
def test_data_of_unknown_length(steps):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True)
    throughput = Throughput()
    fitted(throughput, data=data, steps_per_execution=steps)
    # Six batches: with four in a call, the second one of an epoch has but two, and is not counted among the times.
    assert_paced(throughput.figures, 16 if steps == 1 else 48)
    assert throughput.figures["step_time_p50_ms"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("known", [True, False], ids=["steps-known", "unknown"])
@pytest.mark.parametrize("rows", [16, 96], ids="{}-rows".format)
def test_rows_of_a_validation_are_none_of_the_epoch(known, rows):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    data = data if known else data.filter(lambda x, y: True)
    evaluates = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(X, Y, verbose=0))]
    model, throughput = inner(), Throughput(interval=1e-6)
    model.compile("sgd", "mse", jit_compile=False)
    validation = {"validation_data": (X[:rows], Y[:rows]), "validation_batch_size": 16}
    arguments = {
        "epochs": 3,
        "shuffle": False,
        "verbose": 0,
        "callbacks": [*(evaluates if known else []), Pause(), throughput],
    }
    history = model.fit(data, **arguments, **validation).history
    ratios = np.divide(history["examples_per_second"], history["updates_per_second"])
    np.testing.assert_allclose(ratios, 16, rtol=1e-6)
    assert_paced(throughput.figures, 16)


def test_an_evaluation_between_batches_gives_no_negative_rate():
    model = inner()
    model.compile("sgd", "mse", jit_compile=False)
    evaluates = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 3 and model.evaluate(X[:16], Y[:16], verbose=0)
    )
    throughput = Throughput(interval=1e-6)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[evaluates, throughput]).history
    assert all(rate > 0 for rate in history["examples_per_second"])


def test_a_generator():
    def batches():
        while True:
            yield X[:16], Y[:16]

    model, throughput = inner(), Throughput(flops=True)
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(batches(), steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[Pause(), throughput])
    assert_paced(throughput.figures, 16)


def test_a_train_step_of_your_own():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {"loss": tf.reduce_mean(self(data[0]))}

    _, figures = fitted(Throughput(), Own(inner().layers))
    assert "examples_per_second" not in figures
    _, figures = fitted(Throughput(batch_size=16), Own(inner().layers))
    assert_paced(figures, 16)


@pytest.mark.long
def test_it_goes_with_telemetry_in_any_order():
    for callbacks in ([GradientTelemetry(every=2), Throughput()], [Throughput(), GradientTelemetry(every=2)]):
        model = inner()
        model.compile("sgd", "mse")
        history = model.fit(X, Y, batch_size=16, verbose=0, callbacks=callbacks).history
        assert history["examples_per_second"][0] > 0
        assert history["gradient_norm"][0] > 0
        figures = next(each for each in callbacks if isinstance(each, Throughput)).figures
        assert figures["retraces"] == 0
        assert not hasattr(model.train_function, "ended")


def test_the_progress_bar_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    model = inner()
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=16, verbose=2, callbacks=[Throughput()])
    assert "examples_per_second: " in capsys.readouterr().out


def test_a_graph_that_is_traced_again_is_named_with_its_shapes(tmp_path, caplog):
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)

    class Lengths(keras.callbacks.Callback):
        """Hands the train function iterators of its own, each of another shape."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                data = tf.data.Dataset.from_tensors((np.ones((8, 5, 2), "float32"), np.ones((8, 1), "float32")))
                self.model.train_function(iter(data.repeat()))

    throughput = Throughput(tmp_path)
    data = tf.data.Dataset.from_tensors((np.ones((8, 3, 2), "float32"), np.ones((8, 1), "float32"))).repeat(4)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[throughput, Lengths()])
    assert throughput.figures["retraces"] == 1
    rows = list(csv.DictReader((tmp_path / "retraces.csv").read_text().splitlines()))
    assert [row["signature"] for row in rows] == ["float32[8,?,2], float32[8,1]"]
    assert "float32[8,?,2]" in caplog.text


class SlowToTrace(keras.layers.Layer):
    """Takes long to be traced, and no time afterwards."""

    def call(self, x):
        time.sleep(SECONDS_LEFT_OUT)
        return x


class TracesAgain(keras.callbacks.Callback):
    """Has Keras make its train function anew, as other callbacks do."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 8:
            self.model.make_train_function(force=True)


def left_out(folder):
    rows = csv.DictReader((folder / "throughput.csv").read_text().splitlines())
    return {
        quantity: [(float(row["step"]), float(row["value"])) for row in rows if row["quantity"] == quantity]
        for rows in [list(rows)]
        for quantity in ("compile_s", "profiler_s")
    }


@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.long)], ids=["profiler first", "throughput first"]
)
def test_compiling_and_the_profilers_stops_are_left_out(tmp_path, monkeypatch, first):
    close = WindowTracer.close

    @ProfilerPauses.timed()
    def slowly(self, batch):
        time.sleep(SECONDS_LEFT_OUT)
        return close.__wrapped__(self, batch)

    monkeypatch.setattr(WindowTracer, "close", slowly)
    model = keras.Sequential([keras.Input((6,)), SlowToTrace(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    throughput = Throughput(tmp_path, interval=100)
    profiler = Profiler(tmp_path, ProfileSchedule(skip_first=3, warmup=0, active=3), summary=False, report=None)
    callbacks = [profiler, throughput] if first else [throughput, profiler]
    x, y = np.ones((19 * 16 + 4, 6), "float32"), np.ones((19 * 16 + 4, 1), "float32")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[Pause(), TracesAgain(), *callbacks])
    (first_compiled, again, *last), (began, ended) = left_out(tmp_path)["compile_s"], left_out(tmp_path)["profiler_s"]
    # Keras 3.16 traces the last batch's size by itself.
    assert [step for step, _ in last] in ([], [20])
    assert first_compiled[0] == 1 and again[0] == 9 and min(first_compiled[1], again[1]) > SECONDS_LEFT_OUT
    assert began[0] == 4 and ended[0] == 7 and ended[1] > SECONDS_LEFT_OUT
    times = np.array(throughput._times)
    assert len(times) == 20 - 2 - len(last) and times.max() < SECONDS_LEFT_OUT
    # The last batch has 4 examples; a step that is left out has as many as the others on average.
    examples = (18 * 16 + 4) * len(times) / 19
    assert throughput.figures["examples_per_second"] == pytest.approx(examples / times.sum(), rel=1e-3)
    assert throughput.figures["updates_per_second"] == pytest.approx(len(times) / times.sum(), rel=1e-3)
    # In the report, both speeds are marked where time was left out.
    marks = re.findall(
        r'"kind":"(\w+)","name":"[\w ]+","seconds":[\d.]+,"steps":(\[.*?\])', write_report(tmp_path).read_text()
    )
    expected = [("compile_s", [1, 9, *(step for step, _ in last)]), ("profiler_s", [4, 7])]
    assert [(kind, json.loads(steps)) for kind, steps in marks] == 2 * expected


def test_files_and_tensorboard(tmp_path):
    history, figures = fitted(Throughput(tmp_path))
    rows = list(csv.DictReader((tmp_path / "throughput.csv").read_text().splitlines()))
    assert list(rows[0]) == ["step", "epoch", "quantity", "value"]
    found = {(row["epoch"], row["quantity"]): (row["step"], float(row["value"])) for row in rows}
    assert found["1", "examples_per_second"] == ("12", pytest.approx(figures["examples_per_second"], rel=1e-11))
    assert {name for _, name in found} == {*figures, "compile_s"}
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"throughput/{name}" for name in figures}
    last = events.Scalars("throughput/step_time_p95_ms")[-1]
    assert (last.step, last.value) == (12, pytest.approx(history["step_time_p95_ms"][-1]))


def test_utilization():
    _, figures = fitted(Throughput(peak_flops=1e9))
    # Forward 6 x 5 and 5 x 1; the gradients of both kernels, and of the second layer's input.
    assert figures["flops_per_step"] == 2 * 16 * (30 + 5 + 30 + 5 + 5)
    rate = figures["examples_per_second"] / 16
    assert figures["mfu"] == pytest.approx(figures["flops_per_step"] * rate / 1e9, rel=1e-6)


def test_a_model_whose_operations_cannot_be_counted():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6, 1)), keras.layers.SimpleRNN(3), keras.layers.Dense(1)])
    _, figures = fitted(Throughput(peak_flops=1e9), model)
    assert "flops_per_step" not in figures
    assert "mfu" not in figures


def test_a_step_that_fails_takes_the_clock_off():
    model = inner()
    model.compile("sgd", "mse", jit_compile=False)
    x = tf.data.Dataset.range(4).map(
        lambda row: tf.debugging.check_numerics(tf.ones([2, 6]) / tf.cast(1 - row, "float32"), "")
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(x.map(lambda row: (row, row[:, :1])), shuffle=False, verbose=0, callbacks=[Throughput()])
    assert not hasattr(model.train_function, "ended")


def test_a_directory_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        _, figures = fitted(Throughput(tmp_path / "file" / "log"))
    assert caplog.text.count("is no longer written") == 1
    assert figures["examples_per_second"] > 0


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
@pytest.mark.parametrize("distributed", [True, False], ids=["ours", "stock"])
def test_two_replicas(mirrored, distributed):
    with mirrored.scope():
        model = inner()
        model.compile("sgd", "mse")
    throughput = Throughput(flops=True)
    fit = DistributedFit(strategy=mirrored).fit if distributed else type(model).fit
    fit(model, X, Y, batch_size=16, shuffle=False, epochs=2, verbose=0, callbacks=[Pause(), throughput])
    assert_paced(throughput.figures, 16)
    assert throughput.figures["flops_per_step"] == 2 * 16 * 75
