"""Saving in the middle of a window, and going on from there: on as many replicas or on fewer, with it or without."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.saving import FORMATS, check_config, saved_and_loaded
from oracles.whole_batches import largest_difference, train_on_whole_windows, windows
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

TOLERANCE = 1e-6
LONG = pytest.mark.long
BEGUN, REST = DataCase((2, 4, 4, 2, 6), seed=1), DataCase((4, 2, 4, 6), seed=2)


def carrying():
    return AccumulatingOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.05), 3, tail="carry")


def train(model, data):
    model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])


def check_resumed(model):
    assert model.optimizer.window.position.numpy() == 2
    train(model, REST)
    whole = build_model(lambda: keras.optimizers.Adam(0.01, clipnorm=0.05))
    train_on_whole_windows(whole, windows([*BEGUN.batches(), *REST.batches()], lambda _: 3, 1, "drop"))
    assert model.optimizer.iterations.numpy() == 3
    assert largest_difference(model, whole) < TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMATS)
def test_in_the_middle_of_a_window(form, tmp_path):
    # Tracing takes longer than a few small steps; one of those that go on is traced.
    model = build_model(carrying, run_eagerly=True)
    train(model, BEGUN)

    def rebuild():
        return build_model(carrying, run_eagerly=form != "checkpoint")

    check_resumed(saved_and_loaded(model, rebuild, form, tmp_path))


@pytest.mark.own_process
@pytest.mark.parametrize("form", [pytest.param(form, marks=() if form == "checkpoint" else LONG) for form in FORMATS])
def test_begun_on_two_replicas_goes_on_on_one(mirrored, form, tmp_path):
    # Tracing takes longer than a few small steps.
    model = build_model(carrying, strategy=mirrored, run_eagerly=True)
    train(model, BEGUN)
    rebuild = functools.partial(build_model, carrying, run_eagerly=True)
    check_resumed(saved_and_loaded(model, rebuild, form, tmp_path))


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("form", ["weights.h5", pytest.param("checkpoint", marks=LONG)])
def test_begun_on_one_device_goes_on_on_two_replicas(mirrored, form, tmp_path):
    model = build_model(carrying, run_eagerly=True)
    train(model, BEGUN)

    def rebuild():
        with mirrored.scope():
            parallel = build_model(carrying, strategy=mirrored)
            parallel.optimizer.build(parallel.trainable_variables)
        return parallel

    check_resumed(saved_and_loaded(model, rebuild, form, tmp_path))


# Of windows of three: in the middle of one, and at the end of one.
@pytest.mark.few(1)
@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=LONG), 2, 3, pytest.param(4, marks=LONG)])
def test_backup_and_restore(stop_after, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == stop_after:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)

    interrupted = build_model(carrying, run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(BEGUN.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation(), backup(), Stop()])
    resumed = build_model(carrying, run_eagerly=True)
    left = BEGUN.batches()[stop_after:]
    data = tf.data.Dataset.from_generator(lambda: iter(left), output_signature=BEGUN.dataset().element_spec)
    resumed.fit(data, shuffle=False, verbose=0, callbacks=[ExactAccumulation(), backup()])
    straight = build_model(carrying, run_eagerly=True)
    train(straight, BEGUN)
    assert resumed.optimizer.window.position.numpy() == straight.optimizer.window.position.numpy() == 2
    assert largest_difference(resumed, straight) < TOLERANCE


@pytest.mark.covering
@pytest.mark.parametrize("form", ["weights.h5", "checkpoint"])
@pytest.mark.parametrize("inner", [keras.optimizers.Adam, keras.optimizers.Nadam])
@pytest.mark.parametrize("accumulating_first", [False, True])
def test_the_inner_optimizers_state_goes_both_ways(form, inner, accumulating_first, tmp_path):
    makers = [inner, lambda: AccumulatingOptimizer(inner(), 2)]
    first, second = reversed(makers) if accumulating_first else makers
    model = build_model(first, run_eagerly=True)
    model.fit(BEGUN.dataset(), shuffle=False, verbose=0)
    loaded = build_model(second)
    loaded.optimizer.build(loaded.trainable_variables)
    if form == "weights.h5":
        model.save_weights(tmp_path / "saved.weights.h5")
        loaded.load_weights(tmp_path / "saved.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "saved"))
        tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).read(path).expect_partial()
    assert loaded.optimizer.iterations.numpy() > 0
    for before, after in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())


def test_state_of_another_optimizer_is_refused_aloud(tmp_path):
    model = build_model(lambda: keras.optimizers.Adam(), run_eagerly=True)
    model.fit(BEGUN.dataset(), shuffle=False, verbose=0)
    model.save_weights(tmp_path / "saved.weights.h5")
    other = build_model(lambda: AccumulatingOptimizer(keras.optimizers.SGD(), 2))
    other.optimizer.build(other.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        other.load_weights(tmp_path / "saved.weights.h5")


def test_a_wrapped_optimizer_keeps_its_state():
    model = build_model(lambda: keras.optimizers.Adam(), run_eagerly=True)
    model.fit(BEGUN.dataset(), shuffle=False, verbose=0)
    adam = model.optimizer
    made = adam.iterations.numpy()
    model.compile(AccumulatingOptimizer(adam, 2), "mse", run_eagerly=True)
    train(model, BEGUN)
    assert adam.iterations.numpy() == made + 3


@pytest.mark.parametrize("steps", [3, [(0, 2), (100, 8)]], ids=["number", "pairs"])
def test_config(steps):
    check_config(
        AccumulatingOptimizer(
            keras.optimizers.AdamW(0.01, clipnorm=1.0),
            steps,
            weighting="examples",
            tail="carry",
            accumulator_dtype="bfloat16",
            skip_nonfinite=True,
            name="accumulating",
        )
    )


def test_a_file_says_how_to_load_it(tmp_path, monkeypatch):
    build_model(carrying).save(tmp_path / "model.keras")
    monkeypatch.delitem(keras.saving.get_custom_objects(), "keras_paragrad>AccumulatingOptimizer")
    with pytest.raises(Exception, match=r"import keras_paragrad before keras.models.load_model\(path\), or"):
        keras.models.load_model(tmp_path / "model.keras")
    keras.models.load_model(tmp_path / "model.keras", compile=False)
