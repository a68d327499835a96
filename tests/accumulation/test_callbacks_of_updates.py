"""Callbacks in `ExactAccumulation(callbacks=...)` see what callbacks of a `fit` on whole batches see."""

import keras
import numpy as np
import pytest
from sample_models.cases import DataCase, build_model

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation
from keras_paragrad.distribution import Backup

SIZE, STEPS = 12, 3
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(40, 5)).astype("float32")
Y = X[:, :2] * 2


class Records(keras.callbacks.Callback):
    """Records each hook with what it gets, and the weights at it."""

    def __init__(self):
        super().__init__()
        self.events, self.weights = [], []

    def note(self, *event):
        self.events.append((*event[:-1], *(event[-1] or {}).values()))
        self.weights.append(np.concatenate([weight.ravel() for weight in self.model.get_weights()]))

    def on_train_begin(self, logs=None):
        self.note("train begins", self.params["steps"], logs)

    def on_train_end(self, logs=None):
        self.note("train ends", logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.note("epoch begins", epoch, self.params["steps"], logs)

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch ends", epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self.note("batch begins", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch ends", batch, logs)

    def on_test_begin(self, logs=None):
        self.note("test begins", logs)

    def on_test_batch_begin(self, batch, logs=None):
        self.note("test batch begins", batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self.note("test batch ends", batch, logs)

    def on_test_end(self, logs=None):
        self.note("test ends", logs)


class Acts(keras.callbacks.Callback):
    """Clips and averages weights, raises the rate, and stops: what a batch's end is used for."""

    def on_train_begin(self, logs=None):
        self.average, self.losses = self.model.get_weights(), []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) * 1.3
        self.losses.append(logs["loss"])
        self.model.set_weights([np.clip(weight, -0.4, 0.4) for weight in self.model.get_weights()])
        self.average = [0.9 * a + 0.1 * w for a, w in zip(self.average, self.model.get_weights(), strict=True)]
        self.model.stop_training = int(optimizer.iterations) == 6

    def on_train_end(self, logs=None):
        self.model.set_weights(self.average)


def model_of(steps=None, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(AccumulatingOptimizer(optimizer, steps) if steps else optimizer, "mse", **options)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_they_see_and_do_what_they_do_with_whole_batches(replicas):
    """Of 40 rows, the last window has one micro-batch; the rate finder stops in the second epoch."""
    options = {"epochs": 3, "shuffle": False, "verbose": 0}
    options |= {"validation_data": (X[:10], Y[:10]), "validation_batch_size": 5}
    whole, seen, done = model_of(run_eagerly=True), Records(), Acts()
    whole.fit(X, Y, batch_size=SIZE, callbacks=[done, seen], **options)
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"]) if replicas > 1 else DistributedFit("none")
    with dist.scope():
        parts, seen_in_parts, done_in_parts = model_of(STEPS, run_eagerly=replicas == 1), Records(), Acts()
    callbacks = [ExactAccumulation(callbacks=[done_in_parts, seen_in_parts])]
    dist.fit(parts, X, Y, batch_size=SIZE // STEPS, callbacks=callbacks, **options)
    assert len(done_in_parts.losses) == 6
    np.testing.assert_allclose(done_in_parts.losses, done.losses, atol=1e-5)
    assert [event[0] for event in seen_in_parts.events] == [event[0] for event in seen.events]
    for ours, other in zip(seen_in_parts.events, seen.events, strict=True):
        np.testing.assert_allclose(np.array(ours[1:], float), np.array(other[1:], float), atol=2e-5)
    np.testing.assert_allclose(seen_in_parts.weights, seen.weights, atol=1e-6)
    for ours, other in zip(parts.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-6)


ENDS = {"flush": [0, 1, 2, 0, 1, 2], "carry": [0, 1, 0, 1], "drop": [0, 1, 0, 1]}


@pytest.mark.few(0, "1-carry-True")
@pytest.mark.parametrize(
    ("steps_per_execution", "tail", "known_length"),
    [
        (1, "flush", False),
        (1, "carry", True),
        (1, "carry", False),
        (1, "drop", True),
        (4, "flush", True),
        (4, "flush", False),
    ],
)
def test_their_batches_are_updates(tail, steps_per_execution, known_length):
    data = DataCase((4,) * 7, known_length=known_length)
    eager = steps_per_execution == 1
    model = build_model(
        lambda: AccumulatingOptimizer("sgd", 3, tail=tail), steps_per_execution=steps_per_execution, run_eagerly=eager
    )
    records = Records()
    callbacks = [ExactAccumulation(callbacks=[records])]
    model.fit(data.dataset(), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    ends = [event[1] for event in records.events if event[0] == "batch ends"]
    # A call of Keras's that ends several updates ends the last of them.
    assert ends == ([0, 2, 0, 2] if steps_per_execution == 4 and known_length else ENDS[tail])
    steps = {"flush": [3, 3], "carry": [2, 2], "drop": [2, 2]}[tail] if known_length else [None, None]
    assert [event[2] for event in records.events if event[0] == "epoch begins"] == steps


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 7:
            raise KeyboardInterrupt


def test_a_resumed_epoch_goes_on_counting(tmp_path):
    """From a backup in the middle of the third window."""
    model, records = model_of(STEPS, run_eagerly=True), Records()
    options = {"batch_size": 2, "shuffle": False, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, **options, callbacks=[ExactAccumulation(), Interrupt(), Backup(tmp_path, every=1)])
    model = model_of(STEPS, run_eagerly=True)
    model.fit(X, Y, **options, callbacks=[ExactAccumulation(callbacks=[records]), Backup(tmp_path)])
    seen = [event[:2] for event in records.events if event[0].startswith("batch")]
    assert seen == [(f"batch {what}", batch) for batch in range(2, 7) for what in ("begins", "ends")]


def test_callbacks_of_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"callbacks\[0\]` is Backup, which counts micro-batches itself"):
        ExactAccumulation(callbacks=[Backup(tmp_path)])
    with pytest.raises(ValueError, match="a Keras callback"):
        ExactAccumulation(callbacks=["clip"])
