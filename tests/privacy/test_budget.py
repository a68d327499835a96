"""What is spent, shown, and stopped at; and the statement."""

import csv
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.private_updates import cross_entropy, perceptron, some_data

from keras_paragrad import privacy
from keras_paragrad.privacy import AdaptiveClip, make_private
from keras_paragrad.privacy.calibration import gradient_noise_multiplier

SIZE, DELTA = 15, 1e-3


def build(**options):
    arguments = {"clip_norm": 1.0, "expected_batch_size": SIZE, "delta": DELTA, "seed": 0, **options}
    private = make_private(perceptron(), **arguments)
    private.compile("sgd", cross_entropy(), run_eagerly=True)
    return private


def test_epsilon_is_shown_everywhere(tmp_path, capsys):
    x, y = some_data()
    private = build(noise_multiplier=1.0)
    seen = []
    callbacks = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["epsilon"])),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="epsilon", mode="min"),
        keras.callbacks.TensorBoard(tmp_path / "board", update_freq=1, write_graph=False),
    ]
    history = private.fit(x, y, epochs=2, validation_data=(x, y), callbacks=callbacks, verbose=2).history
    rate = SIZE / len(x)
    expected = [
        privacy.epsilon(1.0, rate, updates, DELTA, truncation=private.privacy.truncation) for updates in range(1, 9)
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-12)
    np.testing.assert_allclose(history["epsilon"], [expected[3], expected[7]], rtol=1e-12)
    assert "epsilon: " in capsys.readouterr().out
    with (tmp_path / "log.csv").open() as file:
        assert [float(row["epsilon"]) for row in csv.DictReader(file)] == history["epsilon"]
    (events,) = (tmp_path / "board" / "train").iterdir()
    values = [value for event in tf.compat.v1.train.summary_iterator(str(events)) for value in event.summary.value]
    for tag, wanted in (("batch_epsilon", expected), ("epoch_epsilon", history["epsilon"])):
        found = [tf.make_ndarray(value.tensor) for value in values if value.tag == tag]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert private.privacy.epsilon == expected[-1]
    assert private.privacy.updates == 8
    assert private.privacy.sampling_rate == rate


def test_noise_is_calibrated(caplog):
    x, y = some_data()
    private = build(target_epsilon=2.0, epochs=3, examples=len(x))
    noise = private.privacy.noise_multiplier
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        history = private.fit(x, y, epochs=3, verbose=0).history
    assert 1.99 < history["epsilon"][-1] <= 2.0
    assert private.privacy.noise_multiplier == noise
    assert private.privacy.updates_left == 0
    assert not [record for record in caplog.records if "training stops" in record.message]
    with pytest.raises(ValueError, match="The budget is spent: 12 updates were made"):
        private.fit(x, y, epochs=4, initial_epoch=3, verbose=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("per_call", [1, 3])
def test_training_stops_where_the_budget_ends(caplog, per_call):
    x, y = some_data()
    private = make_private(
        perceptron(), clip_norm=1.0, expected_batch_size=SIZE, delta=DELTA, target_epsilon=2.0, epochs=2
    )
    private.compile("sgd", cross_entropy(), steps_per_execution=per_call, jit_compile=False, run_eagerly=per_call == 1)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        history = private.fit(x, y, epochs=5, verbose=0).history
    assert private.privacy.updates == 8
    assert history["epsilon"][-1] <= 2.0
    assert len(history["epsilon"]) == 2
    assert "8 updates were made, as many as make_private(target_epsilon=2, epochs=2) allows" in caplog.text


def test_it_is_said_once_what_is_not_private(caplog):
    x, y = some_data()
    private = build(noise_multiplier=1.0)
    with caplog.at_level(logging.WARNING, "keras_paragrad"):
        for _ in range(2):
            private.fit(x, y, verbose=0)
    assert caplog.text.count("Epsilon holds for the weights") == 1


def test_statement():
    x, y = some_data()
    private = build(noise_multiplier=1.0, clip_norm=AdaptiveClip(0.7))
    private.fit(x, y, verbose=0)
    said = private.privacy.statement()
    for part in (
        f"({private.privacy.epsilon:.3g}, 0.001)-differentially private after 4 updates",
        "one example added or removed",
        "draws each of 60 examples with probability 0.25",
        "Poisson",
        "noise multiplier 1 ",
        "0.7 quantile",
        "Rényi",
        "hyperparameters",
    ):
        assert part in said


def test_an_adaptive_norm_is_paid_for():
    x, y = some_data()
    clip = AdaptiveClip(quantile=0.5, initial=1e-3, learning_rate=1.0, count_noise=1.5)
    private = build(noise_multiplier=1.0, clip_norm=clip)
    assert private.privacy.gradient_noise_multiplier == gradient_noise_multiplier(1.0, 1.5) > 1
    private.fit(x, y, epochs=4, verbose=0)
    fixed = privacy.epsilon(1.0, SIZE / len(x), 16, DELTA, truncation=private.privacy.truncation)
    assert private.privacy.epsilon == fixed
    norm = float(private.per_example.state.norm)
    within = np.mean(private.per_example.norms[private.per_example.norms > 0] <= norm)
    assert norm > 0.05
    assert 0.1 < within < 0.9


def test_another_size_of_data_is_refused():
    x, y = some_data()
    private = build(noise_multiplier=1.0)
    with pytest.raises(ValueError, match="unknown until fit\\(\\) gets the data"):
        _ = private.privacy.sampling_rate
    assert "unknown" in repr(private.privacy)
    private.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match="The data have 59 examples, and epsilon is computed for 60"):
        private.fit(x[1:], y[1:], verbose=0)
    with pytest.raises(ValueError, match="`expected_batch_size` is 15, and the data have 10 examples"):
        build(noise_multiplier=1.0).fit(x[:10], y[:10], verbose=0)


def test_rows_are_enough_for_almost_all_draws():
    private = build(noise_multiplier=1.0, examples=60_000, expected_batch_size=256, delta=1e-5)
    assert 340 < private.privacy.rows_needed < 420
    assert private.privacy.truncation * 10**6 < 1e-7
    everyone = build(noise_multiplier=1.0, examples=10, expected_batch_size=10)
    assert everyone.privacy.rows()[0] >= 11
    assert everyone.privacy.truncation == 0
