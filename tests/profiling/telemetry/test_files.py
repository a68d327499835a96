"""The files of `GradientTelemetry`: CSV and TensorBoard."""

import csv
import json
import logging
import math

import keras
import numpy as np
import pytest
from oracles.telemetry_loops import X, Y, expected, inner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from keras_paragrad.profiling.report import write_report
from keras_paragrad.profiling.telemetry import GradientTelemetry
from keras_paragrad.profiling.throughput import Throughput, ThroughputFiles

QUANTITIES = ("gradient_norm", "clipped_gradient_norm", "weight_norm", "update_ratio", "nonfinite")


def adam(**more):
    return keras.optimizers.Adam(0.01, **more)


def fitted(log_dir, fits=1):
    model = inner()
    # Tracing takes longer than a few small steps.
    model.compile(adam(clipnorm=0.3), "mse", run_eagerly=True)
    telemetry = GradientTelemetry(log_dir, every=3)
    for _ in range(fits):
        model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[telemetry])
    return telemetry


def csv_rows(log_dir):
    rows = csv.DictReader((log_dir / "telemetry.csv").read_text().splitlines())
    return [
        (int(r["step"]), int(r["epoch"]), r["layer"], r["variable"], r["quantity"], float(r["value"])) for r in rows
    ]


def test_a_table_has_every_weight_and_the_model(tmp_path):
    telemetry = fitted(tmp_path)
    found = {row[:-1]: row[-1] for row in csv_rows(tmp_path)}
    weights = [(layer, name) for layer in ("first", "second") for name in ("kernel", "bias")]
    model = [("", "", name) for name in ("gradient_norm", "clipped_gradient_norm", "loss_scale", "learning_rate")]
    labels = [*model, *((*weight, quantity) for weight in weights for quantity in QUANTITIES)]
    assert set(found) == {(step, (step - 1) // 6, *label) for step in (3, 6, 9, 12) for label in labels}
    wanted = expected(adam, 16, epochs=2, clip={"clipnorm": 0.3})
    for step in (3, 6, 9, 12):
        rate, gradients, clipped, _, _ = wanted[step - 1]
        epoch = (step - 1) // 6
        assert found[step, epoch, "", "", "learning_rate"] == pytest.approx(rate)
        assert found[step, epoch, "", "", "loss_scale"] == 1
        assert found[step, epoch, "", "", "gradient_norm"] == pytest.approx(np.linalg.norm(gradients), rel=1e-3)
        for (layer, name), before, after in zip(weights, gradients, clipped, strict=True):
            assert found[step, epoch, layer, name, "gradient_norm"] == pytest.approx(before, rel=1e-3)
            assert found[step, epoch, layer, name, "clipped_gradient_norm"] == pytest.approx(after, rel=1e-3)
    assert telemetry.layers == ("first", "second")


@pytest.mark.long
def test_another_training_begins_the_table_anew(tmp_path):
    fitted(tmp_path)
    before = csv_rows(tmp_path)
    fitted(tmp_path)
    assert csv_rows(tmp_path) == before


NOT_OURS = b"when,what\n1,mine\n"


def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path, caplog):
    (tmp_path / "telemetry.csv").write_bytes(NOT_OURS)
    telemetry = fitted(tmp_path, 2)
    assert telemetry.last.steps[-1] == 24
    assert (tmp_path / "telemetry.csv").read_bytes() == NOT_OURS
    assert "telemetry.csv already exists with other columns, and was not changed" in caplog.text


@pytest.mark.parametrize("name", ["throughput.csv", "retraces.csv"])
def test_a_file_of_somebody_else_is_left_as_it_is_by_throughput(name, tmp_path, caplog):
    (tmp_path / name).write_bytes(NOT_OURS)
    files = ThroughputFiles(tmp_path, resume=True)
    files.append(1, 0, {"examples_per_second": 2.0})
    files.append_retraces(1, [("train", "shapes")])
    files.close()
    assert (tmp_path / name).read_bytes() == NOT_OURS
    assert f"{name} already exists with other columns" in caplog.text


def test_a_directory_of_telemetry_alone_says_what_was_trained(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[GradientTelemetry(tmp_path, every=1)])
    found = json.loads((tmp_path / "run.json").read_text())
    # Built by the first batch, after `fit` began.
    assert (found["model"], found["parameters"]) == (model.name, model.count_params())
    page = write_report(tmp_path).read_text()
    assert f"Profile of {model.name}" in page and "Gradient of the whole model" in page


def test_throughput_alone_says_what_was_trained(tmp_path):
    model = inner()
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[Throughput(tmp_path)])
    assert json.loads((tmp_path / "run.json").read_text())["optimizer"] == "SGD"


def test_tensorboard_has_the_layers(tmp_path):
    telemetry = fitted(tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = {f"telemetry_{quantity}/{layer}" for quantity in QUANTITIES for layer in telemetry.layers}
    model = ("gradient_norm", "clipped_gradient_norm", "loss_scale", "learning_rate", "update_ratio", "nonfinite")
    assert set(events.Tags()["scalars"]) == tags | {f"telemetry/{name}" for name in model}
    found = events.Scalars("telemetry_gradient_norm/first")
    assert [event.step for event in found] == [3, 6, 9, 12]
    assert [event.value for event in found] == pytest.approx(telemetry.last.layers.gradient_norm[:, 0].tolist())


def test_a_directory_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        telemetry = fitted(tmp_path / "file" / "log")
    assert [record.getMessage().count("training continues") for record in caplog.records] == [1]
    assert telemetry.last.steps[-1] == 12


def test_weights_of_zeros_have_no_ratio(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0, callbacks=[GradientTelemetry(tmp_path, every=1)])
    ratios = [row[-1] for row in csv_rows(tmp_path) if row[3:5] == ("bias", "update_ratio")]
    assert math.isnan(ratios[0])
    assert ratios[1] > 0


def test_two_of_them():
    model = inner()
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="two GradientTelemetry"):
        model.fit(X, Y, verbose=0, callbacks=[GradientTelemetry(), GradientTelemetry()])
    model.fit(X, Y, verbose=0)
    assert "make_train_function" not in model.__dict__
