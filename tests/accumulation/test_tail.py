"""What becomes of an epoch's last window, and who sees it when."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference, train_on_whole_windows, windows
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

MODES = {
    "plain": {},
    "several steps an execution": {"steps_per_execution": 4},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}


def inner():
    return keras.optimizers.Adam(0.01)


@pytest.mark.few(0, "flush-9-several steps an execution-False", "drop-6-eager-False")
@pytest.mark.parametrize("known_length", [False, True])
# Several steps an execution are plain ones.
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode == "plain")) for mode in MODES])
@pytest.mark.parametrize(("tail", "updates"), [("flush", 9), ("carry", 7), ("drop", 6)])
def test_tail(tail, updates, mode, known_length):
    # Of two sizes, as XLA compiles once for each.
    data = DataCase((3, 4, 4, 3, 4, 4, 3), known_length=known_length)
    model = build_model(lambda: AccumulatingOptimizer(inner(), 3, tail=tail), **MODES[mode])
    model.fit(data.dataset(), epochs=3, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    whole = build_model(inner)
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 3, 3, tail))
    assert model.optimizer.iterations.numpy() == updates
    assert model.optimizer.window.position.numpy() == 0
    assert largest_difference(model, whole) < 1e-6


def test_a_call_of_several_batches_of_known_number_takes_them_all():
    test_tail("flush", 9, "several steps an execution", True)


def test_carry_keeps_the_window_for_the_next_fit():
    data = DataCase((3, 4, 2, 5))
    model = build_model(lambda: AccumulatingOptimizer(inner(), 3, tail="carry"), run_eagerly=True)
    for _ in range(2):
        model.fit(data.dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    whole = build_model(inner)
    train_on_whole_windows(whole, windows(data.batches(), lambda _: 3, 2, "carry"))
    assert model.optimizer.window.position.numpy() == 2
    assert largest_difference(model, whole) < 1e-6


class Watch(keras.callbacks.Callback):
    """Notes how many updates had been made when it was asked."""

    def __init__(self):
        super().__init__()
        self.at_validation, self.at_end = [], []

    def on_test_begin(self, logs=None):
        self.at_validation.append(int(self.model.optimizer.iterations.numpy()))

    def on_epoch_end(self, epoch, logs=None):
        self.at_end.append(int(self.model.optimizer.iterations.numpy()))


@pytest.mark.few(1)
@pytest.mark.parametrize("known_length", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_validation_and_other_callbacks_see_the_flushed_weights(known_length, first):
    data = DataCase((4,) * 7, known_length=known_length)
    model = build_model(lambda: AccumulatingOptimizer(inner(), 3), run_eagerly=True)
    watch = Watch()
    callbacks = [ExactAccumulation(), watch]
    model.fit(
        data.dataset(),
        validation_data=data.dataset(),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=callbacks if first else callbacks[::-1],
    )
    assert watch.at_validation == watch.at_end == [3, 6]


def test_an_epoch_that_is_broken_off_is_flushed():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 4

    model = build_model(lambda: AccumulatingOptimizer(inner(), 3), run_eagerly=True)
    model.fit(DataCase((4,) * 9).dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation(), Stop()])
    assert model.optimizer.iterations.numpy() == 2
    assert model.optimizer.window.position.numpy() == 0


def test_steps_per_epoch_over_endless_data():
    data = DataCase((4,) * 5)
    model = build_model(lambda: AccumulatingOptimizer(inner(), 2), run_eagerly=True)
    model.fit(
        data.dataset().repeat(), steps_per_epoch=5, epochs=2, shuffle=False, verbose=0, callbacks=[ExactAccumulation()]
    )
    assert model.optimizer.iterations.numpy() == 6


@pytest.mark.long
def test_filtered_data_of_unknown_length_does_not_let_counters_drift():
    rows = np.arange(40, dtype="float32")[:, np.newaxis] * np.ones((1, 5), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :2])).filter(lambda x, y: x[0] % 3 > 0).batch(4)
    for steps_per_execution in (1, 3):
        model = build_model(
            lambda: AccumulatingOptimizer(keras.optimizers.SGD(1e-6), 3),
            steps_per_execution=steps_per_execution,
            run_eagerly=steps_per_execution == 1,
        )
        # 26 rows are left, in 7 micro-batches: windows of 3, 3 and 1.
        model.fit(data, epochs=4, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
        assert model.optimizer.iterations.numpy() == 12


def test_without_the_callback_counters_do_not_drift_either():
    data = DataCase((4,) * 7, known_length=False)
    carrying = AccumulatingOptimizer(inner(), 4, weighting="uniform", tail="carry")
    model = build_model(lambda: carrying, run_eagerly=True)
    model.fit(data.dataset(), epochs=4, shuffle=False, verbose=0)
    assert model.optimizer.iterations.numpy() == 7
    assert model.optimizer.window.position.numpy() == 0


def test_flushing_is_compiled_once(monkeypatch):
    model = build_model(lambda: AccumulatingOptimizer(inner(), 3))
    traced = []
    update = AccumulatingOptimizer._update
    monkeypatch.setattr(AccumulatingOptimizer, "_update", lambda self, run: (traced.append(1), update(self, run))[1])
    counts = []
    for _ in range(3):
        model.fit(DataCase((4,) * 4).dataset(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
        counts.append(len(traced))
    assert counts[0] == counts[2] > 0
