"""A batch passes the folders and functions that docs/architecture.md lists, in their order."""

import re
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, microbatch, wrap
from keras_paragrad.distribution import DistributedFit

PACKAGE = f"{Path(keras_paragrad.__file__).parent}/"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
ROOMS = ("accumulation/", "engine/calls/", "engine/proof/", "engine/step/", "engine/training/")
X, Y = np.random.default_rng(0).random((2, 32, 1), "float32")


class Passed(keras.callbacks.Callback):
    """The files and functions that the first batch passes, in the order of their first calls."""

    def __init__(self):
        super().__init__()
        self.functions = {}

    def note(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            key = code.co_filename.removeprefix(PACKAGE), code.co_qualname.rpartition("<locals>.")[2]
            self.functions.setdefault(key, len(self.functions))

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            threading.setprofile(self.note)
            sys.setprofile(self.note)

    def on_train_batch_end(self, batch, logs=None):
        threading.setprofile(None)
        sys.setprofile(None)


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def model(kind=keras.Model):
    inputs = keras.Input((1,))
    made = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(3)(inputs)))
    made.compile("sgd", "mse")
    return made


def in_windows(passed):
    accumulated = model()
    accumulated.compile(AccumulatingOptimizer("sgd", steps=2), "mse")
    accumulated.fit(X, Y, 8, verbose=0, callbacks=[ExactAccumulation(), passed])


def in_slices(passed, kind=keras.Model):
    cut = model(kind)
    microbatch(cut, size=4)
    cut.fit(X, Y, 16, verbose=0, callbacks=[passed])


def on_replicas(passed):
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        replicated = model()
    # The last batch is smaller: replicas are weighted.
    dist.fit(replicated, X, Y, batch_size=15, verbose=0, callbacks=[passed])


def by_examples(passed):
    wrapped = wrap(model(), clip_norm=1.0)
    wrapped.compile("sgd", "mse")
    wrapped.fit(X, Y, 16, verbose=0, callbacks=[passed])


WALKS = {
    "One micro-batch of a window": in_windows,
    "One batch in slices": in_slices,
    "One batch on replicas": on_replicas,
    "One batch by single examples": by_examples,
    "A step of the model's own": lambda passed: in_slices(passed, OwnStep),
}


def listed_of(walk):
    """A section, and the folder or file and the function of each of its steps."""
    section = PAGE.read_text().partition(f"### {walk}\n")[2].partition("\n#")[0]
    listed = re.findall(r"^\d+\. `([\w/.]+)`, `([\w.]+)`", section, re.MULTILINE)
    assert 0 < len(listed) <= 8
    return section, listed


# Each Python call is looked at.
@pytest.mark.parametrize("walk", WALKS)
def test_a_batch_passes_what_is_listed_in_its_order(walk):
    section, listed = listed_of(walk)
    passed = Passed()
    WALKS[walk](passed)
    first = {}
    for (file, function), place in passed.functions.items():
        for folder, name in listed:
            if name == function and file.startswith(folder):
                first.setdefault((folder, name), place)
    assert [each for each in listed if each not in first] == []
    assert sorted(listed, key=first.get) == listed
    through = {room for room in ROOMS if any(file.startswith(room) for file, _ in passed.functions)}
    assert through <= set(re.findall(r"`([\w/]+/)`", section))


def test_what_a_worker_does_is_where_it_is_listed():
    for file, function in listed_of("One batch of a worker")[1]:
        assert f"def {function.rpartition('.')[2]}(" in Path(PACKAGE, file).read_text(), (file, function)
