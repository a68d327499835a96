"""Windows hold the batches and updates that ran, in the figures that xprof has for them."""

import json
import re
import sys
import time
import timeit

import keras
import numpy as np
import pytest
import tensorflow as tf
from runner import own_process
from trainings import profiled

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, GradientTelemetry
from keras_paragrad.profiling.log_files import write_run_info
from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.session import SUMMARY
from keras_paragrad.profiling.summary import ProfileSummary, RunInfo
from keras_paragrad.profiling.tracer import Profiler

SCHEDULE = ProfileSchedule(skip_first=6, warmup=1, active=8)


def profiler(folder, schedule=SCHEDULE, **options):
    return Profiler(folder, schedule, **{"summary": False, "report": None, **options})


class Count(keras.callbacks.Callback):
    """Which batches ran, by Keras's own hooks."""

    def on_train_begin(self, logs=None):
        self.ran = 0

    def on_train_batch_end(self, batch, logs=None):
        self.ran += 1


def test_a_window_with_a_step_that_compiles_says_which_to_trace(tmp_path):
    def advice(schedule):
        callback, watched = profiler(tmp_path, schedule), GradientTelemetry(tmp_path, every=5)
        profiled.model().fit(*profiled.arrays(14), batch_size=profiled.ROWS, verbose=0, callbacks=[watched, callback])
        (summary,) = callback.summaries
        return summary.advice

    first = advice(ProfileSchedule(skip_first=2, active=3))
    assert first.kind == "compile"
    # What it says is what helps.
    assert advice(eval(re.search(r"ProfileSchedule\(.*?\)", first.text)[0])).kind != "compile"


def assert_as_xprof(folder, summary, from_python=False):
    """The steps are those of xprof's overview; it leaves out the first and the last of a trace.

    Where batches come from Python, waiting for its lock is input for us, and the host's computing for xprof.
    """
    for tool in ("overview_page", "input_pipeline_analyzer"):
        rows = {row["stepnum"].split()[-1]: row for row in profiled.table(folder / summary.trace, tool, "stepTimeMs")}
        ours = {str(step.step): step for step in summary.steps}
        assert len(rows) >= len(ours) - 2 > 0 and rows.keys() <= ours.keys()
        for number, row in rows.items():
            step = ours[number]
            busy = step.host + step.compile + step.compute + step.collective
            found = (step.duration, step.input, busy, step.idle)
            expected = [row[name] for name in ("stepTimeMs", "infeedTimeMs", "hostComputeTimeMs", "otherTimeMs")]
            if from_python:
                found, expected = [(each[0], each[1] + each[2], each[3]) for each in (found, expected)]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_steps_are_those_that_ran_and_those_of_xprof(tmp_path, jit):
    callback, model = profiler(tmp_path), profiled.model(jit_compile=jit)
    model.fit(profiled.dataset(20), epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    assert [step.step for step in summary.steps] == list(range(7, 15))
    assert [step.update for step in summary.steps] == list(range(7, 15))
    assert summary.run.jit == jit
    assert_as_xprof(tmp_path, summary)
    kept = json.loads((tmp_path / summary.trace / "keras_paragrad.json").read_text())
    assert ProfileSummary.from_dict(kept) == summary


def test_operations_are_those_of_xprof_with_their_layers(tmp_path):
    callback = profiler(tmp_path)
    profiled.model(units=128).fit(profiled.dataset(20), shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    rows = {
        row["operation"]: row for row in profiled.table(tmp_path / summary.trace, "framework_op_stats", "operation")
    }
    assert len(summary.operations) == 50
    for each in summary.operations:
        row = rows[each.name]
        assert (each.kind, each.count) == (row["type"], row["occurrences"])
        assert each.milliseconds == pytest.approx(row["total_self_time"] / 1e3)
    times = [each.milliseconds for each in summary.operations]
    assert times == sorted(times, reverse=True)
    # All three layers, though the second is named as TensorFlow would name the first when it meets it again.
    products = {each.layer for each in summary.operations if "MatMul" in each.kind}
    assert products == {"first", "first_1", "last"}


# Unlike those of a known length, the last call of an epoch has no batch.
@pytest.mark.parametrize("known", [pytest.param(True, marks=pytest.mark.long), False], ids=["known", "unknown"])
def test_several_batches_in_a_call(tmp_path, known):
    callback, model = profiler(tmp_path), profiled.model(steps_per_execution=5)
    # 12 batches an epoch: the third call has two of them, and of unknown length there is a fourth with none.
    model.fit(profiled.dataset(12, known), epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    # From the first call after batch 7 to the end of a call, all that ran.
    assert [step.step for step in summary.steps] == list(range(10, 22))
    assert [step.update for step in summary.steps] == list(range(10, 22))
    assert any("several batches" in note for note in summary.notes)
    begins = [step.begins for step in summary.steps]
    assert begins == sorted(begins)


@pytest.mark.long
def test_data_of_unknown_length_ends_without_a_step(tmp_path):
    callback, count = profiler(tmp_path), Count()
    profiled.model().fit(
        profiled.dataset(9, known=False), epochs=2, shuffle=False, verbose=0, callbacks=[callback, count]
    )
    (summary,) = callback.summaries
    assert count.ran == 18
    assert [step.step for step in summary.steps] == list(range(7, 15))


@pytest.mark.long
def test_a_generator(tmp_path):
    x, y = profiled.arrays(40)

    def batches():
        for row in range(0, len(x), profiled.ROWS):
            yield x[row : row + profiled.ROWS], y[row : row + profiled.ROWS]

    callback = profiler(tmp_path)
    profiled.model().fit(batches(), shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    assert [step.step for step in summary.steps] == list(range(7, 15))
    assert_as_xprof(tmp_path, summary, from_python=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ours", "keras"])
def test_micro_batches_are_steps_of_whole_updates(tmp_path, kind):
    ours = kind == "ours"
    optimizer = AccumulatingOptimizer("adam", 4) if ours else keras.optimizers.Adam(gradient_accumulation_steps=4)
    callback = profiler(tmp_path)
    callbacks = [ExactAccumulation(), callback] if ours else [callback]
    profiled.model(optimizer).fit(profiled.dataset(24), shuffle=False, verbose=0, callbacks=callbacks)
    (summary,) = callback.summaries
    # It begins with the first update after batch 7.
    assert [(step.step, step.update) for step in summary.steps] == [(batch, batch // 4) for batch in range(8, 16)]
    assert_as_xprof(tmp_path, summary)


@pytest.mark.long
@pytest.mark.own_process(seconds=240)
def test_two_replicas(tmp_path):
    dist = DistributedFit(strategy=tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    with dist.scope():
        model = profiled.model()
    callback = profiler(tmp_path)
    dist.fit(model, *profiled.arrays(20), batch_size=profiled.ROWS, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    assert [step.step for step in summary.steps] == list(range(7, 15))
    assert (summary.run.strategy, summary.run.replicas) == ("MirroredStrategy", 2)
    assert_as_xprof(tmp_path, summary)
    assert sum(step.collective for step in summary.steps) > 0


def test_a_window_ends_where_validation_begins(tmp_path):
    data = profiled.dataset(5)
    for folder, validation in (("with", data), ("without", None)):
        schedule = ProfileSchedule(skip_first=1, wait=1, warmup=1, active=2 if validation is None else 9, repeat=2)
        callback = profiler(tmp_path / folder, schedule)
        profiled.model().fit(data, epochs=4, shuffle=False, verbose=0, validation_data=validation, callbacks=[callback])
    with_validation, without = (
        [ProfileSummary.from_dict(json.loads(path.read_text())) for path in sorted((tmp_path / folder).rglob(SUMMARY))]
        for folder in ("with", "without")
    )
    assert [[step.step for step in summary.steps] for summary in with_validation] == [[3, 4], [14]]
    counts = [
        {each.kind: each.count for each in found[0].operations if "MatMul" in each.kind}
        for found in (with_validation, without)
    ]
    assert counts[0] == counts[1] and counts[0]


@pytest.mark.long
def test_windows_repeat(tmp_path):
    callback = profiler(tmp_path, ProfileSchedule(skip_first=2, wait=1, warmup=1, active=3, repeat=None))
    profiled.model().fit(profiled.dataset(19), shuffle=False, verbose=0, callbacks=[callback])
    seen = [[step.step for step in summary.steps] for summary in callback.summaries]
    assert seen == [[4, 5, 6], [9, 10, 11], [14, 15, 16]]
    left = sorted(path.parent.name for path in tmp_path.rglob("*.xplane.pb"))
    assert left == [summary.trace.rpartition("/")[2] for summary in callback.summaries]
    assert not list(tmp_path.glob(".tracing-*"))


def test_run_json_of_somebody_else_is_left_as_it_is(tmp_path, caplog):
    for content in ('{"model": "mine"}', "mine", "[1]"):
        (tmp_path / "run.json").write_text(content)
        write_run_info(tmp_path, RunInfo())
        assert (tmp_path / "run.json").read_text() == content
    assert caplog.text.count("run.json was not written by keras_paragrad, and was not changed") == 3
    (tmp_path / "run.json").unlink()
    for name in ("one", "other"):
        write_run_info(tmp_path, RunInfo(model=name))
    assert json.loads((tmp_path / "run.json").read_text())["model"] == "other"


class Asks(keras.callbacks.Callback):
    """Asks for a window at a batch."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if batch == 9:
            self.how()


def test_a_callback_asks_for_a_window(tmp_path):
    callback = profiler(tmp_path, None)
    asks = Asks(callback.trace_now)
    profiled.model().fit(profiled.dataset(40), shuffle=False, verbose=0, callbacks=[callback, asks])
    (summary,) = callback.summaries
    assert [step.step for step in summary.steps] == list(range(12, 22))


@pytest.mark.few(1)
@pytest.mark.parametrize(("milliseconds", "bound"), [(30, True), (0, False)], ids=["slowed", "quick"])
def test_a_slow_pipeline_is_called_input_bound_and_no_other(tmp_path, milliseconds, bound):
    callback = profiler(tmp_path)
    model = profiled.model(units=32 if bound else 2048)
    model.fit(
        profiled.dataset(20, milliseconds=milliseconds).prefetch(2), shuffle=False, verbose=0, callbacks=[callback]
    )
    (summary,) = callback.summaries
    assert (summary.advice.kind == "input") == bound
    if bound:
        assert "num_parallel_calls" in summary.advice.text and "waits for input" in summary.advice.evidence


def test_a_map_that_tensorflow_joins_with_its_batch_is_advised_to_run_in_parallel(tmp_path):
    def slowly(x):
        # Computing would take as much longer on a busy machine as the step does.
        time.sleep(0.003)
        return x

    data = tf.data.Dataset.from_tensor_slices(profiled.arrays(16))
    data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(slowly, [x], x.dtype), (16,)), y))
    data = data.batch(profiled.ROWS)
    callback = profiler(tmp_path)
    profiled.model().fit(data, shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    assert summary.advice.kind == "input" and "pipeline's MapAndBatch" in summary.advice.evidence
    assert "num_parallel_calls=n" in summary.advice.text and ".prefetch(" not in summary.advice.text


class SlowBatches(keras.utils.PyDataset):
    """Batches that take longer to make than an eager step, which Python sleeps, or works and lets nobody else in."""

    def __init__(self, sleeps):
        super().__init__()
        self.sleeps, self.batch = sleeps, profiled.arrays(1)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.sleeps:
            time.sleep(0.15)
        else:
            # One operation of the interpreter, which holds its lock throughout.
            pow(3, 2_000_000)
        return self.batch


@pytest.fixture
def switch_interval():
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sleeps", "eagerly", "interval"),
    [
        (True, False, 5e-3),
        (False, False, 5e-3),
        pytest.param(False, True, 5e-3, marks=pytest.mark.long),
        (False, True, 5e-5),
    ],
    ids=["sleeps", "lock", "lock, eagerly", "lock, eagerly, taken between calls"],
)
def test_python_that_makes_batches_is_waited_for(tmp_path, switch_interval, sleeps, eagerly, interval):
    switch_interval(interval)
    callback = profiler(tmp_path, ProfileSchedule(skip_first=3, warmup=1, active=6))
    profiled.model(run_eagerly=eagerly).fit(SlowBatches(sleeps), shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    assert summary.advice.kind == "input", summary.advice
    assert "PyDataset" in summary.advice.text


@pytest.mark.long
def test_training_is_the_same_to_the_bit(tmp_path):
    def trained(callbacks):
        keras.utils.set_random_seed(0)
        model = profiled.model()
        model.fit(profiled.dataset(20), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    for one, other in zip(trained([]), trained([profiler(tmp_path)]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_between_windows_a_batch_costs_next_to_nothing(tmp_path):
    callback = profiler(tmp_path, ProfileSchedule(skip_first=10**9))
    callback.set_model(profiled.model())
    callback.set_params({"steps": 10})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    code = "c.on_train_batch_begin(3); c.on_train_batch_end(3)"
    microseconds = min(timeit.repeat(code, globals={"c": callback}, number=20000, repeat=5)) / 20000 * 1e6
    callback.on_train_end()
    assert microseconds < 5, "1% of a step of 0.5 ms"


def test_importing_the_callback_does_not_import_xprof():
    assert not {"xprof"} & set(own_process.imported_with("keras_paragrad.profiling.tracer"))
