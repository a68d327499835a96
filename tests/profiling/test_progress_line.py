"""Keras's progress bar stays within a line, whatever callbacks add to `logs`."""

import re

import keras
import numpy as np
import pytest

from keras_paragrad import GradientTelemetry, Throughput
from keras_paragrad.profiling import telemetry, throughput

X = np.random.default_rng(0).normal(size=(160, 8)).astype("float32")


def fitted(capsys, callbacks, **options):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, clipnorm=1.0), "mse")
    history = model.fit(X, X[:, :1], epochs=2, batch_size=16, callbacks=callbacks, **options).history
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).replace("\b", "")
    return history, [line.rstrip() for line in re.split(r"[\r\n]", printed) if "━" in line]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(60, ()), (90, ("mfu",)), (100, ("gradient_norm",)), (200, ("examples_per_second", "gradient_norm", "mfu"))],
)
def test_as_much_as_fits_and_history_has_all(columns, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    callbacks = [GradientTelemetry(every=1), Throughput(interval=1e-6, peak_flops=1e12)]
    history, lines = fitted(capsys, callbacks)
    assert max(map(len, lines)) <= columns
    named = {name for name in (*telemetry.SHOWN, *throughput.SHOWN) if f" {name}: " in lines[-1]}
    assert named == set(shown)
    assert {"gradient_norm", "update_ratio", "clipped_gradient_norm", "examples_per_second", "retraces"} <= set(history)
    # All names of figures are known.
    assert set(history) <= {"loss", *telemetry.SHOWN, *throughput.SHOWN}


def test_validation_takes_its_room(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, lines = fitted(capsys, [GradientTelemetry(every=1)], validation_data=(X, X[:, :1]))
    assert max(map(len, lines)) <= 100 and "gradient_norm" not in lines[-1] and "val_loss" in lines[-1]


@pytest.mark.parametrize("verbose", [0, 2])
def test_without_a_bar(verbose, capsys):
    history, lines = fitted(capsys, [GradientTelemetry(every=1)], verbose=verbose)
    assert not lines and len(history["gradient_norm"]) == 2
