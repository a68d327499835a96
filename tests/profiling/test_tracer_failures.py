"""Whatever goes wrong with profiling is logged in one line with its fix, and training continues."""

import builtins
import importlib.util
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from runner import own_process
from trainings import profiled

from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.tracer import Profiler

SCHEDULE = ProfileSchedule(skip_first=4, warmup=1, active=4)


def trained(callback, batches=16, callbacks=()):
    model = profiled.model()
    model.fit(profiled.dataset(batches), shuffle=False, verbose=0, callbacks=[callback, *callbacks])
    assert int(model.optimizer.iterations.numpy()) == batches


def profiler(folder, schedule=SCHEDULE, **options):
    return Profiler(folder, schedule, **{"summary": False, "report": None, **options})


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "keras_paragrad"]


def assert_one_line(caplog, *parts):
    (line,) = lines(caplog)
    for part in (*parts,):
        assert part in line and "\n" not in line


def assert_no_profiler_is_left():
    with pytest.raises(tf.errors.UnavailableError):
        tf.profiler.experimental.stop()


def test_another_profiler_is_running(tmp_path, caplog):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        trained(profiler(tmp_path / "ours", ProfileSchedule(skip_first=4, warmup=1, active=2, repeat=3)))
    finally:
        tf.profiler.experimental.stop(save=False)
    assert_one_line(caplog, "another profiler is running", "Remove `profile_batch`", "Training continues")
    assert not list((tmp_path / "ours").glob(".tracing-*"))


@pytest.mark.long
def test_keras_takes_the_profiler_first(tmp_path, caplog):
    other = keras.callbacks.TensorBoard(tmp_path / "other", profile_batch=(2, 10))
    callback = profiler(tmp_path / "ours", ProfileSchedule(skip_first=4, warmup=1, active=2, repeat=3))
    trained(callback, callbacks=[other])
    assert_one_line(caplog, "another profiler is running")
    # The third window comes when the other has ended.
    assert [step.step for step in callback.summaries[0].steps] == [11, 12]


def test_somebody_else_ends_ours(tmp_path, caplog):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                tf.profiler.experimental.stop(save=False)

    trained(profiler(tmp_path), callbacks=[Ends()])
    assert_one_line(caplog, "A window was not traced", "Training continues")
    assert_no_profiler_is_left()


def test_a_window_that_never_began_is_said_at_the_end(tmp_path, caplog):
    trained(profiler(tmp_path, ProfileSchedule(skip_first=100)))
    assert_one_line(caplog, "begins after 102 batches, and training had 16", "ProfileSchedule(skip_first=4, ")
    assert_no_profiler_is_left()


def test_a_training_that_ends_while_warming_up(tmp_path, caplog):
    trained(profiler(tmp_path, ProfileSchedule(skip_first=10, warmup=20)))
    assert_one_line(caplog, "begins after 30 batches")
    assert_no_profiler_is_left()


def test_a_training_that_ends_in_a_window_has_a_shorter_one(tmp_path, caplog):
    callback = profiler(tmp_path, ProfileSchedule(skip_first=10, warmup=1, active=50))
    trained(callback)
    assert [step.step for step in callback.summaries[0].steps] == [11, 12, 13, 14, 15]
    assert lines(caplog) == []


def test_a_fit_that_breaks_off_leaves_nothing_that_the_next_trips_over(tmp_path, caplog):
    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise ZeroDivisionError

    callback = profiler(tmp_path)
    with pytest.raises(ZeroDivisionError):
        trained(callback, callbacks=[Breaks()])
    trained(callback)
    assert [step.step for step in callback.summaries[0].steps] == [5, 6, 7, 8]
    assert lines(caplog) == []


@pytest.mark.long
def test_another_profiler_after_a_fit_that_broke_off(tmp_path):
    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(profiler(tmp_path / "one"), callbacks=[Breaks()])
    callback = profiler(tmp_path / "two")
    trained(callback)
    assert len(callback.summaries[0].steps) == 4


@pytest.mark.parametrize("missing", ["xprof", "tensorboard"])
def test_a_missing_package_is_said_at_construction(tmp_path, caplog, monkeypatch, missing):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == missing else there(name, *more)
    )
    Profiler(tmp_path, SCHEDULE)
    assert_one_line(caplog, f"Profiler needs {missing} (to ", "pip install 'keras_paragrad[profile]'")


@pytest.mark.long
def test_a_report_that_fails_is_no_window_that_was_not_traced(tmp_path, caplog):
    (tmp_path / "report.html").write_text("of another program")
    callback = profiler(tmp_path, report="html")
    caplog.clear()
    trained(callback)
    assert_one_line(caplog, "The report was not written: ", "was not replaced. Write to another file")
    assert len(callback.summaries) == 1


def test_figures_that_cannot_be_printed_are_no_window_that_was_not_traced(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("keras_paragrad.profiling.tracer.print_figures", lambda figures: Path("none").read_text())
    callback = profiler(tmp_path, summary=True)
    trained(callback)
    assert_one_line(caplog, "A window's summary was not printed: ")
    assert len(callback.summaries) == 1


def test_a_summary_that_cannot_be_written_is_no_window_that_was_not_traced(tmp_path, caplog, monkeypatch):
    written = Path.write_text

    def refuse(path, *arguments):
        if path.name == "keras_paragrad.json" and "plugins" in path.parts:
            raise OSError(28, "No space left on device")
        return written(path, *arguments)

    monkeypatch.setattr(Path, "write_text", refuse)
    callback = profiler(tmp_path)
    trained(callback)
    assert_one_line(caplog, "The trace is in ", "its summary could not be written", "No space left")
    assert len(callback.summaries) == 1


def test_without_xprof_there_is_a_trace_all_the_same(tmp_path, caplog, monkeypatch):
    imported = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name.startswith("xprof"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    callback = profiler(tmp_path)
    trained(callback)
    assert_one_line(caplog, "No module named 'xprof.", "pip install")
    assert callback.summaries[0].steps == () and callback.summaries[0].notes
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


def test_a_log_directory_that_cannot_be(tmp_path, caplog):
    (tmp_path / "file").touch()
    trained(profiler(tmp_path / "file" / "logs"))
    assert all("Make space in" in line and "Training continues" in line for line in lines(caplog))
    assert lines(caplog)
    assert_no_profiler_is_left()


def test_a_disk_that_is_full(tmp_path):
    ((updates, windows, said),) = own_process.call(
        profiled.trained_on_a_full_disk, tmp_path / "logs", [{}], seconds=240
    )
    assert (updates, windows) == (16, 0)
    assert len(said) == 1 and "A window was not traced" in said[0] and "Make space in" in said[0]
    assert not list((tmp_path / "logs").glob(".tracing-*"))


def test_a_report_is_written_at_the_end(tmp_path):
    trained(profiler(tmp_path, report="html"))
    assert "<html" in (tmp_path / "report.html").read_text("utf-8")
